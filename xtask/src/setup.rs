//! What a machine needs to build and try ironlb, and how it gets there: looks first, installs only what
//! is missing, and says what and why.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::exec::{command, exec, find, output, stage, target_directory};
use crate::image::{Arch, Compiler};

/// Name under which Debian's compiler is linked into rustup; lb-userspace's build script looks for it.
const LINKED: &str = "ironlb-bpf";
/// Pinned together with the compiler's LLVM: the linker must not be the older one.
const LINKER: (u32, u32, u32) = (0, 13, 0);
/// What builds and runs fuzz targets.
const FUZZER: &str = "0.13.2";
/// Where pinned maps and programs live.
const BPFFS: &str = "/sys/fs/bpf";
/// While this exists and says 101, Debian's packages start no services.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Programs that the laboratory runs: program, Debian package, what for.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("ip", "iproute2", "network namespaces, links and routes"),
    ("tc", "iproute2", "foreign filters beside our own"),
    ("mount", "mount", "the BPF file system"),
    ("nsenter", "util-linux", "agents inside a network namespace"),
    ("ethtool", "ethtool", "offloads of the laboratory's links"),
    ("bpftool", "bpftool", "a look at maps and programs"),
    ("nginx", "nginx-light", "the pods' web servers"),
    (
        "keepalived",
        "keepalived",
        "a VIP that somebody else announces",
    ),
    ("curl", "curl", "the bare-metal hosts"),
    (
        "nft",
        "nftables",
        "foreign firewall rules, and the comparison with kube-proxy",
    ),
    ("iptables", "iptables", "foreign firewall rules"),
    ("ping", "iputils-ping", "whether a VIP answers"),
    ("tcpdump", "tcpdump", "a look at the wire"),
    ("sysctl", "procps", "kernel settings of a namespace"),
];

/// What the Kubernetes cluster of tests and of `cargo xtask cluster` runs besides: as [`PROGRAMS`].
const CLUSTER_PROGRAMS: &[(&str, &str, &str)] = &[
    ("runc", "runc", "containers of the cluster's nodes"),
    ("buildah", "buildah", "container images"),
    ("mmdebstrap", "mmdebstrap", "Debian in Ironic's image"),
    ("mkfs.ext4", "e2fsprogs", "the nodes' disks"),
];
/// What builds Kubernetes, as tests/cluster/*/go.mod ask for it. Go 1.21 and later fetch it by themselves.
const GO: &str = "1.26.0";
/// Where Go is installed by people, and by us where there is none.
const GO_ROOT: &str = "/usr/local/go";
/// Debian's package of Go.
const DEBIAN_GO: &str = "/usr/bin/go";
/// What tests run besides: as [`PROGRAMS`].
const TEST_PROGRAMS: &[(&str, &str, &str)] =
    &[("promtool", "prometheus", "checks of the alert rules")];

/// What boots other kernels: as [`PROGRAMS`].
const KERNEL_PROGRAMS: &[(&str, &str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86", "other kernels"),
    ("cpio", "cpio", "the guests' initial file system"),
    ("modprobe", "kmod", "modules of other kernels"),
    ("xz", "xz-utils", "compressed modules"),
    ("strip", "binutils", "small binaries in the guests"),
    ("teamnl", "libteam-utils", "a team device in a guest"),
];

/// Options of `cargo xtask setup`.
#[derive(clap::Args)]
pub struct Options {
    /// Also install what the Kubernetes cluster needs.
    #[arg(long)]
    cluster: bool,
}

/// Sets the machine up.
///
/// # Errors
/// When something is missing that cannot be installed here; the message says what to do.
pub fn run(Options { cluster }: Options) -> Result<()> {
    if cluster {
        ensure_cluster()?;
    } else {
        ensure()?;
    }
    eprintln!("everything that ironlb needs is here");
    if let Err(missing) = components() {
        eprintln!("for `cargo xtask ci` only: {missing}");
    }
    Ok(())
}

/// Installs what is missing; quiet and quick when nothing is.
///
/// # Errors
/// As [`run`].
pub fn ensure() -> Result<()> {
    if fs::metadata("/proc/self").context("read /proc/self")?.uid() != 0 {
        bail!(
            "this needs root: it installs packages, loads BPF programs and makes network namespaces. \
             Run it as root, e.g. `sudo -E env \"PATH=$PATH\" cargo xtask …`"
        );
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        bail!(
            "this kernel has no BTF (/sys/kernel/btf/vmlinux); one built with CONFIG_DEBUG_INFO_BTF=y is needed, as distributions' are"
        );
    }
    rustup_comes_first()?;
    packages()?;
    let toolchain = toolchain()?;
    linker(&toolchain)?;
    bpffs()
}

/// Installs what is missing to build images and to run the Kubernetes cluster, besides what [`ensure`] does.
///
/// # Errors
/// As [`run`].
pub fn ensure_cluster() -> Result<()> {
    ensure()?;
    install(&missing(CLUSTER_PROGRAMS))?;
    go()
}

/// Installs what is missing to run the tests, besides what [`ensure`] does.
///
/// # Errors
/// As [`run`].
pub fn ensure_tests() -> Result<()> {
    ensure()?;
    install(&missing(TEST_PROGRAMS))
}

/// Installs what is missing to boot other kernels, besides what [`ensure`] does.
///
/// # Errors
/// As [`run`]; also where the guests would be of another architecture than this machine.
pub fn ensure_kernels() -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "other kernels are booted with this machine's binaries, and only amd64's: run this on such a machine"
        );
    }
    ensure()?;
    install(&missing(KERNEL_PROGRAMS))
}

/// Installs what is missing to fuzz, below the target directory, and tells where it is. Unlike [`ensure`] it needs root only
/// where there is no C++ compiler.
///
/// # Errors
/// As [`run`].
pub fn ensure_fuzzer() -> Result<PathBuf> {
    rustup_comes_first()?;
    install(&missing(&[("c++", "g++", "libFuzzer is C++")]))?;
    if let Some(path) = find("cargo-fuzz") {
        return Ok(path);
    }
    let folder = target_directory()?.join("../tools");
    let path = folder.join("bin/cargo-fuzz");
    if !path.exists() {
        stage(
            &format!("build cargo-fuzz {FUZZER}"),
            "it builds and runs the fuzzer; takes about a minute",
            || {
                exec(
                    command("cargo")
                        .args(["install", "cargo-fuzz", "--version", FUZZER, "--locked"])
                        .arg("--root")
                        .arg(&folder),
                )
            },
        )?;
    }
    Ok(path)
}

/// Checks that rustup's components for lints and formatting are installed.
///
/// # Errors
/// When one is not, with the command that installs it.
pub fn components() -> Result<()> {
    for (program, component) in [("cargo-clippy", "clippy"), ("cargo-fmt", "rustfmt")] {
        let installed = command("cargo")
            .args([component.trim_start_matches("rust"), "--version"])
            .output()
            .is_ok_and(|output| output.status.success());
        if !installed {
            bail!("{program} is missing: run `rustup component add {component}`");
        }
    }
    Ok(())
}

/// The toolchain that builds `core` for BPF: the choice of lb-userspace's build script.
///
/// # Errors
/// When there is none.
pub fn toolchain() -> Result<String> {
    if let Some(name) = existing_toolchain() {
        return Ok(name);
    }
    stage(
        &format!("link Debian's compiler into rustup as `{LINKED}`"),
        "rustup's stable compiler cannot build `core` for BPF",
        || exec(command("rustup").args(["toolchain", "link", LINKED, "/usr"])),
    )?;
    existing_toolchain().with_context(|| {
        format!("/usr has no compiler with the source of `core`: `rustup toolchain uninstall {LINKED}`, then again")
    })
}

fn existing_toolchain() -> Option<String> {
    if let Ok(name) = std::env::var("IRONLB_BPF_TOOLCHAIN") {
        return Some(name);
    }
    [LINKED, "nightly"]
        .into_iter()
        .find(|name| {
            output(command("rustup").args(["run", name, "rustc", "--print", "sysroot"]))
                .is_ok_and(|sysroot| has_source(Path::new(sysroot.trim())))
        })
        .map(str::to_owned)
}

fn has_source(sysroot: &Path) -> bool {
    sysroot
        .join("lib/rustlib/src/rust/library/core/src/lib.rs")
        .exists()
}

/// Debian's cargo in front of rustup's would build everything with the wrong compiler.
fn rustup_comes_first() -> Result<()> {
    if find("rustup").is_none() {
        bail!("rustup is missing: install it from https://rustup.rs with its stable toolchain");
    }
    let cargo = find("cargo").context("no `cargo` in PATH")?;
    let real = fs::canonicalize(&cargo).with_context(|| format!("resolve {}", cargo.display()))?;
    if real == Path::new("/usr/bin/cargo") {
        bail!(
            "the first cargo in PATH is Debian's ({}): put rustup's folder, ~/.cargo/bin, in front of /usr/bin",
            cargo.display()
        );
    }
    Ok(())
}

/// Installs Debian packages: the laboratory's programs, and the eBPF compiler unless rustup has one.
fn packages() -> Result<()> {
    let mut missing = missing(PROGRAMS);
    let compiler = Path::new("/usr/bin/rustc").exists() && has_source(Path::new("/usr"));
    if existing_toolchain().is_none() && !compiler {
        missing.extend([
            ("rustc-web", "compiler for the eBPF programs"),
            ("cargo-web", "its cargo"),
            ("rust-web-src", "the source of `core`, built for BPF"),
        ]);
    }
    let lints = match existing_toolchain() {
        Some(name) => name == LINKED,
        None => true,
    };
    if lints && !Path::new("/usr/bin/cargo-clippy").exists() {
        missing.push(("rust-web-clippy", "lints of the eBPF programs"));
    }
    install(&missing)
}

/// Packages of programs that are not in PATH, and what for.
fn missing(
    programs: &[(&'static str, &'static str, &'static str)],
) -> Vec<(&'static str, &'static str)> {
    programs
        .iter()
        .filter(|(program, ..)| find(program).is_none())
        .map(|(_, package, why)| (*package, *why))
        .collect()
}

/// Installs the linker of eBPF programs, built against the compiler's own LLVM.
fn linker(toolchain: &str) -> Result<()> {
    let version = |(major, minor, patch)| format!("{major}.{minor}.{patch}");
    if let Some(path) = find("bpf-linker") {
        let said = output(command(path).arg("--version"))?;
        // Another compiler than ours was somebody's own choice, and so is its linker.
        if toolchain != LINKED || linker_version(&said).is_some_and(|found| found >= LINKER) {
            return Ok(());
        }
    }
    let said = output(command("rustup").args(["run", toolchain, "rustc", "-vV"]))?;
    let llvm = said
        .lines()
        .find_map(|line| line.strip_prefix("LLVM version: ")?.split('.').next())
        .with_context(|| format!("`rustc -vV` of {toolchain} names no LLVM version"))?;
    let llvm_dev = format!("llvm-{llvm}-dev");
    let polly_dev = format!("libpolly-{llvm}-dev");
    let prefix = format!("/usr/lib/llvm-{llvm}");
    let why = "bpf-linker is built against it";
    let wanted = [
        (llvm_dev.as_str(), format!("{prefix}/include/llvm-c/Core.h")),
        (&polly_dev, format!("{prefix}/lib/libPolly.a")),
        ("zlib1g-dev", "/usr/include/zlib.h".to_owned()),
        ("libzstd-dev", "/usr/include/zstd.h".to_owned()),
        ("gcc", "/usr/bin/cc".to_owned()),
        ("g++", "/usr/bin/c++".to_owned()),
    ];
    let missing: Vec<_> = wanted
        .iter()
        .filter(|(_, file)| !Path::new(file).exists())
        .map(|(package, _)| (*package, why))
        .collect();
    install(&missing)?;

    stage(
        &format!("build bpf-linker {}", version(LINKER)),
        "it links eBPF objects; takes about a minute",
        || {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let path = std::env::join_paths(
                [PathBuf::from(&prefix).join("bin")]
                    .into_iter()
                    .chain(std::env::split_paths(&path)),
            )?;
            exec(
                command("cargo")
                    .args([
                        "install",
                        "bpf-linker",
                        "--version",
                        &version(LINKER),
                        "--locked",
                    ])
                    .args([
                        "--no-default-features",
                        "--features",
                        &format!("llvm-{llvm}"),
                    ])
                    .env("LLVM_PREFIX", &prefix)
                    .env("PATH", path),
            )
        },
    )?;
    find("bpf-linker")
        .map(drop)
        .context("bpf-linker is installed, but its folder (~/.cargo/bin?) is not in PATH")
}

/// Makes sure that Rust programs can be built for an architecture that is not this machine's.
///
/// # Errors
/// When something is missing that cannot be installed here.
pub fn cross(arch: Arch) -> Result<Compiler> {
    let (name, target) = (arch.name(), arch.target());
    let gcc = format!(
        "gcc-{}",
        target.replace("-unknown", "").replace("x86_64", "x86-64")
    );
    let libc = format!("libc6-dev-{name}-cross");
    let mut missing = Vec::new();
    if find(arch.linker()).is_none() {
        missing.push((gcc.as_str(), "links for the other architecture"));
        missing.push((libc.as_str(), "its C library"));
    }
    install(&missing)?;

    let libraries = |sysroot: &Path| {
        sysroot
            .join("lib/rustlib")
            .join(target)
            .join("lib")
            .exists()
    };
    let rustup = PathBuf::from(output(command("rustc").args(["--print", "sysroot"]))?.trim());
    let debian = Path::new("/usr");
    if !libraries(&rustup) && !libraries(debian) {
        // Not everywhere can rustup fetch a target.
        let added = output(command("rustup").args(["target", "add", target]));
        if let Err(error) = added {
            eprintln!("rustup has no {target} ({error:#}): Debian's compiler is taken");
            stage(
                &format!("let apt know of {name}"),
                "Rust's standard library for it is a package of that architecture",
                || exec(command("dpkg").args(["--add-architecture", name])),
            )?;
            let library = format!("libstd-rust-web-dev:{name}");
            install(&[
                ("rustc-web", "compiler for the other architecture"),
                (&library, "Rust's standard library for it"),
            ])?;
        }
    }
    if libraries(&rustup) {
        Ok(Compiler::Rustup)
    } else if libraries(debian) {
        Ok(Compiler::Debian)
    } else {
        bail!("there is no standard library of Rust for {target}: `rustup target add {target}`")
    }
}

/// Go, from its module proxy where there is none that can fetch what it needs. Debian 12's is too old for
/// that, but gets the archive of another as a module and checks its sum.
fn go() -> Result<()> {
    let own = Path::new(GO_ROOT).join("bin/go");
    if find("go")
        .or(Some(own))
        .is_some_and(|go| fetches_toolchains(&go))
    {
        return Ok(());
    }
    let debian = Path::new(DEBIAN_GO);
    if !debian.exists() {
        install(&[("golang-go", "Kubernetes is built from source")])?;
    }
    if fetches_toolchains(debian) {
        return Ok(());
    }
    if Path::new(GO_ROOT).exists() {
        bail!("the Go in {GO_ROOT} is too old: install {GO} or newer from https://go.dev/dl");
    }
    stage(
        &format!("install Go {GO} in {GO_ROOT}"),
        "Kubernetes is built from source, and Debian's Go is too old",
        || {
            let arch = match std::env::consts::ARCH {
                "x86_64" => "amd64",
                "aarch64" => "arm64",
                other => other,
            };
            let module = format!("golang.org/toolchain@v0.0.1-go{GO}.linux-{arch}");
            let said = output(command(debian).args(["mod", "download", "-json", &module]))?;
            let said: serde_json::Value =
                serde_json::from_str(&said).context("read the JSON of `go mod download`")?;
            let archive = said["Dir"]
                .as_str()
                .context("`go mod download` names no folder")?;
            exec(command("cp").args(["-rT", archive, GO_ROOT]))?;
            // A module's files are neither writable nor executable.
            exec(command("chmod").args(["-R", "u+w", GO_ROOT]))?;
            exec(
                command("chmod")
                    .args(["-R", "a+x"])
                    .args([format!("{GO_ROOT}/bin"), format!("{GO_ROOT}/pkg/tool")]),
            )
        },
    )
}

/// Whether this Go can fetch the version that a module asks for.
fn fetches_toolchains(go: &Path) -> bool {
    output(command(go).args(["env", "GOVERSION"])).is_ok_and(|said| go_minor(&said) >= Some(21))
}

/// The second number in `go1.26.8`.
fn go_minor(said: &str) -> Option<u32> {
    let rest = said.trim().strip_prefix("go1.")?;
    rest.split(|character: char| !character.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The three numbers in `bpf-linker 0.13.0`.
fn linker_version(said: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = said.split_whitespace().nth(1)?.splitn(3, '.');
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?, next()?))
}

/// Installs Debian packages (name, what for), or says what is needed where there is no apt.
fn install(missing: &[(&str, &str)]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing.iter().map(|(package, _)| *package).collect();
    packages.sort_unstable();
    packages.dedup();
    let list: Vec<String> = missing
        .iter()
        .map(|(package, why)| format!("    {package}: {why}"))
        .collect();
    let list = list.join("\n");
    if find("apt-get").is_none() {
        bail!(
            "missing, and this is not Debian, so install it yourself (names are Debian's):\n{list}\n\
             Instead of rustc-web, cargo-web and rust-web-src: `rustup toolchain install nightly --component rust-src`; \
             instead of building bpf-linker here: `cargo install bpf-linker`"
        );
    }
    eprintln!("missing packages:\n{list}");
    let apt = |arguments: &[&str]| {
        exec(
            command("apt-get")
                .args(["-q", "-o", "Dpkg::Use-Pty=0", "-o", "Acquire::Retries=3"])
                .args(arguments)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    };
    stage("update apt's lists", "packages are missing", || {
        apt(&["update"])
    })?;
    let no_services = NoServices::new()?;
    stage("install packages", &packages.join(" "), || {
        apt(&[
            &["install", "-y", "--no-install-recommends"],
            packages.as_slice(),
        ]
        .concat())
    })
    .context("Debian 12 with its security suite has all of them")?;
    drop(no_services);
    for (package, service) in [("nginx-light", "nginx"), ("prometheus", "prometheus")] {
        if packages.contains(&package) && Path::new("/run/systemd/system").exists() {
            stage(
                &format!("disable {service}.service"),
                "tests run its programs themselves",
                || exec(command("systemctl").args(["disable", "--now", service])),
            )?;
        }
    }
    Ok(())
}

/// Keeps packages from starting services while it lives, unless the machine has a policy of its own.
struct NoServices {
    ours: bool,
}

impl NoServices {
    fn new() -> Result<Self> {
        use std::os::unix::fs::PermissionsExt as _;
        let ours = !Path::new(POLICY).exists();
        if ours {
            fs::write(POLICY, "#!/bin/sh\nexit 101\n")
                .with_context(|| format!("write {POLICY}"))?;
            fs::set_permissions(POLICY, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("make {POLICY} executable"))?;
        }
        Ok(Self { ours })
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = fs::remove_file(POLICY)
        {
            eprintln!(
                "could not remove {POLICY}, which keeps packages from starting services: {error}"
            );
        }
    }
}

/// Mounts the BPF file system, where pinned maps and programs live.
fn bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("read /proc/self/mounts")?;
    let mounted = mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some(BPFFS) && fields.next() == Some("bpf")
    });
    if mounted {
        return Ok(());
    }
    stage(
        &format!("mount {BPFFS}"),
        "maps and programs are pinned there",
        || exec(command("mount").args(["-t", "bpf", "bpf", BPFFS])),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_linker_is_recognised() {
        assert!(linker_version("bpf-linker 0.9.14\n").expect("a version") < LINKER);
        assert!(linker_version("bpf-linker 0.13.0\n").expect("a version") >= LINKER);
        assert_eq!(linker_version("bpf-linker"), None);
    }

    #[test]
    fn a_go_that_cannot_fetch_another_is_recognised() {
        assert_eq!(go_minor("go1.19.8\n"), Some(19));
        assert_eq!(go_minor("go1.26rc1\n"), Some(26));
        assert_eq!(go_minor(""), None);
    }
}
