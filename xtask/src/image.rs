//! `cargo xtask image`: one static binary, in an image from scratch.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::exec::{command, exec, output, stage, target_directory};
use crate::setup;

/// Name of the image in its archive, and in whatever that is loaded into.
const NAME: &str = "localhost/ironlb:dev";
/// Cargo's profile of the binary.
const PROFILE: &str = "image";

/// Options of `cargo xtask image`.
#[derive(clap::Args)]
pub struct Options {
    /// Architecture of the nodes; default is this machine's.
    #[arg(long)]
    arch: Option<Arch>,
}

/// An architecture, as container registries call it.
#[derive(Clone, Copy, clap::ValueEnum, PartialEq, Eq)]
pub enum Arch {
    /// x86-64.
    Amd64,
    /// 64-bit Arm.
    Arm64,
}

impl Arch {
    /// This machine's.
    ///
    /// # Errors
    /// When there are no images for it.
    pub fn own() -> Result<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Self::Amd64),
            "aarch64" => Ok(Self::Arm64),
            other => anyhow::bail!("no image for {other}: amd64 and arm64 are built"),
        }
    }

    /// Its name, which is Debian's too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// What rustc calls it.
    pub fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// C compiler for it on a machine of the other architecture, which links too.
    pub fn linker(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu-gcc",
            Self::Arm64 => "aarch64-linux-gnu-gcc",
        }
    }
}

/// Whose compiler builds for an architecture.
#[derive(Clone, Copy)]
pub enum Compiler {
    /// rustup's.
    Rustup,
    /// Debian's, where rustup cannot fetch the target.
    Debian,
}

/// Builds the image and tells its size.
///
/// # Errors
/// When something does not build.
pub fn run(Options { arch }: Options) -> Result<()> {
    let arch = arch.map_or_else(Arch::own, Ok)?;
    let archive = build(arch)?;
    eprintln!(
        "\n{NAME} is in {0}\n    containerd: ctr --namespace k8s.io images import {0}\n    \
         podman:     podman load --input {0}\n    \
         a registry: skopeo copy oci-archive:{0} docker://REGISTRY/ironlb",
        archive.display()
    );
    Ok(())
}

/// Builds the image; an OCI archive.
///
/// # Errors
/// When something does not build.
pub fn build(arch: Arch) -> Result<PathBuf> {
    setup::ensure_cluster()?;
    let binary = binary(arch)?;
    let target = target()?;
    let context = target.join("image");
    let staged = context.join(arch.name()).join("ironlb");
    fs::create_dir_all(context.join(arch.name()))
        .and_then(|()| fs::copy(&binary, &staged))
        .with_context(|| format!("copy {} to {}", binary.display(), staged.display()))?;
    let archive = target.join(format!("ironlb-{}.tar", arch.name()));
    stage(
        &format!("build the image for {}", arch.name()),
        "buildah, from scratch",
        || pack(arch, &context, &archive),
    )?;
    let size = |path: &Path| -> Result<f64> {
        let metadata = fs::metadata(path).with_context(|| format!("no {}", path.display()))?;
        Ok(metadata.len() as f64 / f64::from(1 << 20))
    };
    eprintln!(
        "    binary {:.1} MiB, image {:.1} MiB compressed",
        size(&staged)?,
        size(&archive)?
    );
    Ok(archive)
}

/// Builds the static binary.
///
/// # Errors
/// When it does not build.
pub fn binary(arch: Arch) -> Result<PathBuf> {
    let cross = arch != Arch::own()?;
    let compiler = if cross {
        setup::cross(arch)?
    } else {
        Compiler::Rustup
    };
    let target = target()?;
    // Debian's compiler has another version: in one directory each would throw away the other's work.
    let directory = match compiler {
        Compiler::Rustup => target,
        Compiler::Debian => target.join("debian"),
    };
    stage(
        &format!("build a static ironlb for {}", arch.name()),
        "two minutes at first",
        || {
            let mut cargo = command("cargo");
            cargo
                .args(["build", "--package", "lb-userspace", "--bin", "ironlb"])
                .args(["--profile", PROFILE, "--target", arch.target()])
                .arg("--target-dir")
                .arg(&directory)
                .env("RUSTFLAGS", "-C target-feature=+crt-static");
            if matches!(compiler, Compiler::Debian) {
                cargo.env("RUSTC", "/usr/bin/rustc");
            }
            if cross {
                let target = arch.target().to_uppercase().replace('-', "_");
                cargo.env(format!("CARGO_TARGET_{target}_LINKER"), arch.linker());
            }
            exec(&mut cargo)
        },
    )?;
    let binary = directory.join(arch.target()).join(PROFILE).join("ironlb");
    ensure!(binary.exists(), "cargo built no {}", binary.display());
    Ok(binary)
}

fn pack(arch: Arch, context: &Path, archive: &Path) -> Result<()> {
    // Of its own and new each time: nothing of it is worth keeping.
    let storage = context.with_extension("storage");
    remove(&storage)?;
    fs::create_dir_all(&storage).with_context(|| format!("create {}", storage.display()))?;
    let configuration = storage.join("storage.conf");
    fs::write(
        &configuration,
        format!(
            "[storage]\ndriver = \"vfs\"\ngraphroot = \"{0}/store\"\nrunroot = \"{0}/run\"\n",
            storage.display()
        ),
    )
    .with_context(|| format!("write {}", configuration.display()))?;
    let buildah = || {
        let mut buildah = command("buildah");
        buildah.env("CONTAINERS_STORAGE_CONF", &configuration);
        buildah
    };
    let platform = format!("linux/{}", arch.name());
    output(
        buildah()
            .args(["bud", "--quiet", "--isolation", "chroot"])
            .args(["--platform", &platform, "--tag", NAME])
            .args(["--build-arg", &format!("TARGETARCH={}", arch.name())])
            .args(["--ignorefile", "/dev/null", "--file", "deploy/Dockerfile"])
            .arg(context),
    )?;
    // Else the archive would get a second image.
    remove(archive)?;
    let destination = format!("oci-archive:{}:{NAME}", archive.display());
    output(buildah().args(["push", "--quiet", NAME, &destination]))?;
    remove(&storage)
}

/// Removes a file or a directory, if it is there.
fn remove(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let removed = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    removed.with_context(|| format!("remove {}", path.display()))
}

/// Cargo's target directory.
fn target() -> Result<PathBuf> {
    let profile = target_directory()?;
    let target = profile
        .parent()
        .context("xtask is not in a target directory")?;
    Ok(target.to_owned())
}
