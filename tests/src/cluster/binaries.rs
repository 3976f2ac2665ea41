//! Kubernetes, etcd, containerd and the CNI plugins, built from source as Go tool dependencies: the
//! versions are those of `tests/cluster/*/go.mod`, the content that of `go.sum`.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::cache::{Inputs, cached, stage};
use crate::command::run;

/// Without what this machine's kernel and libraries may lack.
const TAGS: &str = "no_btrfs,no_zfs";

/// A directory with all of them, built at the first time.
///
/// # Errors
/// When Go is missing or something does not compile.
pub(crate) fn binaries() -> Result<PathBuf> {
    let modules = ["kubernetes", "containers"].map(|module| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("cluster")
            .join(module)
    });
    let mut inputs = Inputs::default().text(TAGS);
    for module in &modules {
        inputs = inputs.path(module)?;
    }
    cached("bin", &inputs, |directory| {
        let go = go()?;
        stage(
            "build Kubernetes, etcd and containerd (Go; some 7 minutes on two cores, once)",
            || {
                std::fs::create_dir(directory)
                    .with_context(|| format!("cannot create {}", directory.display()))?;
                for module in &modules {
                    build(&go, module, directory)?;
                }
                // Named after its package.
                std::fs::rename(directory.join("server"), directory.join("etcd"))
                    .context("Go has built no etcd")
            },
        )
    })
}

/// Where Go is.
fn go() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/go/bin", "/usr/lib/go/bin"].map(PathBuf::from))
        .map(|directory| directory.join("go"))
        .find(|candidate| candidate.is_file())
        .context(
            "a real Kubernetes is built here from source, and Go is missing: \
             `cargo xtask setup --cluster` installs it, or see https://go.dev/dl",
        )
}

/// Builds a module's tools, and its own commands if it has any.
fn build(go: &Path, module: &Path, directory: &Path) -> Result<()> {
    let command = |verb: &str| {
        let mut command = Command::new(go);
        command.current_dir(module).args([verb, "-tags", TAGS]);
        command
    };
    let packages = ["tool", "./..."];
    let needed = run(command("list").arg("-deps").args(packages))?;
    let needed = needed.lines().count();

    let version = run(Command::new(go).current_dir(module).args([
        "list",
        "-m",
        "-f",
        "{{.Path}} {{.Version}}",
        "all",
    ]))?;
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("k8s.io/kubernetes "))
        .unwrap_or_default();
    let mut numbers = version.trim_start_matches('v').split('.');
    let package = "k8s.io/component-base/version";
    let flags = format!(
        "-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={} -X {package}.gitMinor={}",
        numbers.next().unwrap_or_default(),
        numbers.next().unwrap_or_default(),
    );
    let mut build = command("build");
    build
        .args(["-v", "-trimpath", "-ldflags", &flags, "-o"])
        .arg(directory)
        .args(packages);
    follow(&mut build, needed)
}

/// Runs `go build -v`, which names each package that it compiles, and says now and then how far it is.
fn follow(build: &mut Command, needed: usize) -> Result<()> {
    let mut child = build
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {build:?}"))?;
    let stderr = child.stderr.take().context("go build has no stderr")?;
    let mut compiled = 0;
    let mut said = Vec::new();
    let mut last = Instant::now();
    for line in BufReader::new(stderr).lines() {
        let line = line.context("cannot read what go build says")?;
        // A package's path has no spaces; everything else is a message.
        if line.contains(' ') {
            said.push(line);
            continue;
        }
        compiled += 1;
        if last.elapsed() > Duration::from_secs(10) {
            eprintln!("    {compiled} of at most {needed} packages");
            last = Instant::now();
        }
    }
    let status = child.wait().context("cannot wait for go build")?;
    if !status.success() {
        bail!("{build:?} ended with {status}:\n{}", said.join("\n"));
    }
    Ok(())
}
