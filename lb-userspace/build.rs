//! Builds the eBPF object with whichever toolchain can: rustup's nightly with `rust-src`, or the one
//! that `cargo xtask setup` links as `ironlb-bpf`.

use std::process::Command;

use anyhow::{Result, bail};
use aya_build::{Package, Toolchain};

/// Name of the rustup toolchain that `cargo xtask setup` links.
const CUSTOM: &str = "ironlb-bpf";

fn main() -> Result<()> {
    println!("cargo:rerun-if-env-changed=IRONLB_BPF_TOOLCHAIN");
    let toolchain = match std::env::var("IRONLB_BPF_TOOLCHAIN") {
        Ok(name) => name,
        Err(_) if has_source(CUSTOM) => CUSTOM.to_owned(),
        Err(_) if has_source("nightly") => "nightly".to_owned(),
        Err(_) => bail!(
            "no toolchain here can build `core` for BPF: run `cargo xtask setup`, or \
             `rustup toolchain install nightly --component rust-src`, or name one in IRONLB_BPF_TOOLCHAIN"
        ),
    };
    // Its progress would come out as warnings of this package; its errors still do.
    for (name, value) in [("RUSTC_BOOTSTRAP", "1"), ("CARGO_TERM_QUIET", "true")] {
        // SAFETY: a build script's main thread, before any other thread exists.
        unsafe { std::env::set_var(name, value) };
    }
    aya_build::build_ebpf(
        [Package {
            name: "lb-ebpf",
            root_dir: concat!(env!("CARGO_MANIFEST_DIR"), "/../lb-ebpf"),
            ..Package::default()
        }],
        Toolchain::Custom(&toolchain),
    )?;
    // lb-common is compiled into the object too.
    println!("cargo:rerun-if-changed=../lb-common/src");
    Ok(())
}

/// Whether the toolchain exists and brings the source of `core`.
fn has_source(toolchain: &str) -> bool {
    let sysroot = Command::new("rustup")
        .args(["run", toolchain, "rustc", "--print", "sysroot"])
        .output();
    sysroot.is_ok_and(|output| {
        let sysroot = String::from_utf8_lossy(&output.stdout);
        let library = std::path::Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
        output.status.success() && library.join("core/src/lib.rs").exists()
    })
}
