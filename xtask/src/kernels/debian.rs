//! Debian's kernels: found in the archive, fetched without installing them or touching the machine's apt, and kept in
//! `target/kernels` as a guest needs them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use crate::exec::{command, exec, output, stage};

/// The newest kernel that Debian has for its stable release.
pub const NEWEST: &str = "newest";
/// In which suites of the archive a series is; any other is looked for in all of them.
const SUITES: &[(&str, &[&str])] = &[
    ("5.10", &["bullseye-security"]),
    ("6.1", &["bookworm", "bookworm-security"]),
    ("6.12", &["bookworm-backports", "bookworm-security"]),
    (NEWEST, &["trixie-backports"]),
];
/// With virtio and without the drivers of real machines, so small.
const PREFIX: &str = "linux-image-";
const FLAVOUR: &str = "-cloud-amd64";
/// What signs the archive.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Kernel modules of a guest: the laboratory's links and bridge, clsact filters, and the devices of the rows.
const MODULES: &[&str] = &[
    "veth",
    "br_netfilter",
    "sch_ingress",
    "cls_bpf",
    "virtio_pci",
    "virtio_net",
    "8021q",
    "bonding",
    "team",
    "team_mode_roundrobin",
];

/// File that tells what a kept kernel is.
const CONTENT: &str = "content";

/// A kernel that a guest can boot.
pub struct Kernel {
    /// As it was asked for.
    pub version: String,
    /// Debian's package.
    pub package: String,
    /// The kernel itself.
    pub image: PathBuf,
    /// An archive of its modules for the initial file system.
    pub modules: PathBuf,
}

impl Kernel {
    /// Where the kernel of a version is kept.
    fn at(directory: &Path, version: &str) -> Self {
        let directory = directory.join(version);
        Self {
            version: version.to_owned(),
            package: String::new(),
            image: directory.join("vmlinuz"),
            modules: directory.join("modules.cpio"),
        }
    }

    /// The one that is there already, with the modules that are wanted now.
    fn cached(directory: &Path, version: &str) -> Option<Self> {
        let said = fs::read_to_string(directory.join(version).join(CONTENT)).ok()?;
        let package = said.strip_suffix(&modules_line())?.to_owned();
        let kernel = Self::at(directory, version);
        Some(Self { package, ..kernel })
    }
}

/// How a kept kernel's modules are noted behind its package.
fn modules_line() -> String {
    format!(" with {}\n", MODULES.join(" "))
}

/// A version as Debian's packages and users write it: `6.12`, `6.12.117`, or [`NEWEST`].
///
/// # Errors
/// When it is neither.
pub fn parse(version: &str) -> Result<String> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut parts = version.split('.');
    ensure!(
        version == NEWEST || (version.contains('.') && parts.all(is_number)),
        "not a version as `6.1`, nor `{NEWEST}`"
    );
    Ok(version.to_owned())
}

/// Kernels of these versions, fetched where they are not there yet, or anew.
///
/// # Errors
/// When Debian has none, or it cannot be fetched.
pub fn kernels(
    directory: &Path,
    versions: &[String],
    refresh: bool,
    mirror: Option<&str>,
) -> Result<Vec<Kernel>> {
    let is_missing = |version: &&String| refresh || Kernel::cached(directory, version).is_none();
    let missing: Vec<_> = versions.iter().filter(is_missing).collect();
    if !missing.is_empty() {
        let apt = Apt::new(directory, &missing, mirror)?;
        let packages = stage(
            "look for kernels in Debian's archive",
            "with lists of its own: the machine's apt stays as it is",
            || apt.packages(),
        )?;
        for version in missing {
            let package = choose(&packages, version).with_context(|| {
                format!(
                    "Debian has no kernel {version}{FLAVOUR}; there are: {}",
                    series(&packages)
                )
            })?;
            stage(
                &format!("fetch Linux {version}"),
                &format!("{package}, which is not installed"),
                || fetch(directory, version, package, &apt),
            )?;
        }
    }
    let cached = |version: &String| {
        Kernel::cached(directory, version).with_context(|| format!("Linux {version} is not there"))
    };
    versions.iter().map(cached).collect()
}

/// The numbers in a package's name, which order it among its kind.
fn numbers(package: &str) -> Vec<u32> {
    let abi = package.trim_start_matches(PREFIX).trim_end_matches(FLAVOUR);
    let parts = abi.split(|character: char| !character.is_ascii_digit());
    parts.filter_map(|part| part.parse().ok()).collect()
}

/// The newest package of a version.
fn choose<'a>(packages: &'a [String], version: &str) -> Option<&'a str> {
    let series: Vec<u32> = version.split('.').filter_map(|n| n.parse().ok()).collect();
    let of_series = packages.iter().filter(|p| numbers(p).starts_with(&series));
    let newest = of_series.max_by_key(|package| numbers(package));
    newest.map(String::as_str)
}

/// Which series there are, for people.
fn series(packages: &[String]) -> String {
    let mut series: Vec<_> = packages.iter().map(|p| numbers(p)[..2].to_vec()).collect();
    series.sort_unstable();
    series.dedup();
    let series = series.iter().map(|n| format!("{}.{}", n[0], n[1]));
    series.collect::<Vec<_>>().join(", ")
}

/// An apt of our own: sources, lists and cache below a directory.
struct Apt {
    directory: PathBuf,
}

impl Apt {
    fn new(directory: &Path, versions: &[&String], mirror: Option<&str>) -> Result<Self> {
        let directory = directory.join("apt");
        for part in ["lists/partial", "cache/archives/partial", "none"] {
            let path = directory.join(part);
            fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        }
        let (main, security) = mirrors(mirror)?;
        let all = || SUITES.iter().flat_map(|(_, suites)| *suites);
        let mut suites: Vec<&str> = Vec::new();
        for version in versions {
            let known = SUITES.iter().find(|(series, _)| series == version);
            match known {
                Some((_, known)) => suites.extend(*known),
                None => suites.extend(all()),
            }
        }
        suites.sort_unstable();
        suites.dedup();
        let line = |suite: &&str| {
            let site = if suite.ends_with("-security") {
                &security
            } else {
                &main
            };
            format!("deb [arch=amd64 signed-by={KEYRING}] {site} {suite} main\n")
        };
        let sources: String = suites.iter().map(line).collect();
        let file = directory.join("sources.list");
        fs::write(&file, sources).with_context(|| format!("write {}", file.display()))?;
        Ok(Self { directory })
    }

    /// Arguments of every call.
    fn arguments(&self) -> Vec<String> {
        let place = |name: &str, part: &str| {
            let path = self.directory.join(part);
            format!("-oDir::{name}={}", path.display())
        };
        vec![
            place("Etc::SourceList", "sources.list"),
            place("Etc::SourceParts", "none"),
            place("Etc::PreferencesParts", "none"),
            place("State::Lists", "lists"),
            place("Cache", "cache"),
            "-oAPT::Sandbox::User=root".to_owned(),
            "-oAPT::Architecture=amd64".to_owned(),
            "-oAcquire::Languages=none".to_owned(),
            "-oAcquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "-oAcquire::Retries=3".to_owned(),
            "-q".to_owned(),
        ]
    }

    /// Packages of kernels.
    fn packages(&self) -> Result<Vec<String>> {
        let mut update = command("apt-get");
        output(update.args(self.arguments()).arg("update"))?;
        let pattern = format!("^{PREFIX}[0-9].*{FLAVOUR}$");
        let said = output(command("apt-cache").args(self.arguments()).args([
            "search",
            "--names-only",
            &pattern,
        ]))?;
        let names = said.lines().filter_map(|line| line.split(' ').next());
        // A package that only depends on the newest of a series has two numbers.
        Ok(names
            .filter(|name| numbers(name).len() > 2)
            .map(str::to_owned)
            .collect())
    }

    /// A kernel's package and those of its own release that it is split into.
    fn parts(&self, package: &str) -> Result<Vec<String>> {
        let release = package.trim_start_matches(PREFIX);
        let said = output(
            command("apt-cache")
                .args(self.arguments())
                .args(["depends", package]),
        )?;
        let depends = said
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "));
        let own = depends.filter(|name| name.ends_with(release));
        Ok([package]
            .into_iter()
            .chain(own)
            .map(str::to_owned)
            .collect())
    }
}

/// Where Debian and its security updates are: what the machine's apt uses, unless somebody says otherwise.
fn mirrors(mirror: Option<&str>) -> Result<(String, String)> {
    let said = match mirror {
        Some(_) => String::new(),
        None => output(command("apt-get").args(["indextargets", "--format", "$(LABEL) $(SITE)"]))?,
    };
    let site = |label: &str| {
        let mut lines = said.lines().filter_map(|line| line.split_once(' '));
        let (_, site) = lines.find(|(name, _)| *name == label)?;
        Some(site.to_owned())
    };
    let main = mirror
        .map(|mirror| mirror.trim_end_matches('/').to_owned())
        .or_else(|| site("Debian"));
    let main = main.context("apt has no sources of Debian: name a mirror with --mirror")?;
    let security = site("Debian-Security").unwrap_or_else(|| format!("{main}-security"));
    Ok((main, security))
}

/// Fetches a package and keeps what a guest needs of it.
fn fetch(directory: &Path, version: &str, package: &str, apt: &Apt) -> Result<()> {
    let part = directory.join(format!("{version}.part"));
    remove(&part)?;
    let tree = part.join("tree");
    fs::create_dir_all(&tree).with_context(|| format!("create {}", tree.display()))?;
    exec(
        command("apt-get")
            .args(apt.arguments())
            .arg("download")
            .args(apt.parts(package)?)
            .current_dir(&part),
    )?;
    for entry in list(&part)? {
        if entry
            .extension()
            .is_some_and(|extension| extension == "deb")
        {
            exec(command("dpkg").arg("-x").arg(&entry).arg(&tree))?;
        }
    }
    let kept = part.join("kept");
    fs::create_dir_all(&kept).with_context(|| format!("create {}", kept.display()))?;
    let release = package.trim_start_matches(PREFIX);
    let places = [
        tree.join("boot").join(format!("vmlinuz-{release}")),
        tree.join("usr/lib/modules").join(release).join("vmlinuz"),
    ];
    let image = places.iter().find(|path| path.exists());
    let image =
        image.with_context(|| format!("{package} has no kernel where it was looked for"))?;
    fs::copy(image, kept.join("vmlinuz")).with_context(|| format!("copy {}", image.display()))?;
    modules(&tree, release, &part, &kept.join("modules.cpio"))?;
    fs::write(kept.join(CONTENT), format!("{package}{}", modules_line()))
        .context("note what is kept")?;
    let place = directory.join(version);
    remove(&place)?;
    fs::rename(&kept, &place).with_context(|| format!("write {}", place.display()))?;
    remove(&part)
}

/// Packs the modules of a kernel and what they depend on, named in the order of loading.
fn modules(tree: &Path, release: &str, part: &Path, archive: &Path) -> Result<()> {
    // Newer packages have them below /usr, and so looks a newer kmod.
    let (old, new) = (tree.join("lib"), tree.join("usr/lib"));
    for (here, target) in [(&old, "usr/lib"), (&new, "../lib")] {
        if !here.exists() {
            std::os::unix::fs::symlink(target, here)
                .with_context(|| format!("link {}", here.display()))?;
        } else if !here.join("modules").exists() {
            let target = Path::new(target).join("modules");
            let target = Path::new("..").join(target);
            std::os::unix::fs::symlink(target, here.join("modules"))
                .with_context(|| format!("link the modules in {}", here.display()))?;
        }
    }
    exec(command("depmod").arg("-b").arg(tree).arg(release))?;
    let root = part.join("initial");
    let place = root.join("modules");
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    let mut order: Vec<PathBuf> = Vec::new();
    for module in MODULES {
        let said = output(
            command("modprobe")
                // Options of this machine's configuration are not the guest's.
                .args(["-C", "/dev/null", "-d"])
                .arg(tree)
                .args(["-S", release, "--show-depends", module]),
        )
        .with_context(|| format!("the kernel has no module {module}"))?;
        // "insmod PATH", or "builtin NAME", which is there anyway.
        for path in said.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            let path = PathBuf::from(path.trim());
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    for (number, path) in order.iter().enumerate() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let (plain, program) = match (name.strip_suffix(".xz"), name.strip_suffix(".zst")) {
            (Some(plain), _) => (plain, "xz"),
            (_, Some(plain)) => (plain, "zstd"),
            _ => (&*name, "cat"),
        };
        let to = place.join(format!("{number:02}-{plain}"));
        let file = File::create(&to).with_context(|| format!("create {}", to.display()))?;
        let mut unpack = command(program);
        if program != "cat" {
            unpack.arg("-dcq");
        }
        exec(unpack.arg(path).stdout(file))?;
    }
    pack(&root, archive)
}

/// Packs a directory as an initial file system; several behind each other are one.
///
/// # Errors
/// When `cpio` fails.
pub fn pack(root: &Path, archive: &Path) -> Result<()> {
    let file = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let script = "find . | cpio --create --format=newc --owner=+0:+0 --quiet";
    exec(
        command("sh")
            .args(["-e", "-c", script])
            .current_dir(root)
            .stdout(file),
    )
}

/// Removes a directory, if it is there.
///
/// # Errors
/// When it stays.
pub fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        fs::remove_dir_all(path).with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}

fn list(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    entries.with_context(|| format!("list {}", directory.display()))
}

/// What verifies Debian's signatures must be there.
///
/// # Errors
/// When it is not.
pub fn check_keyring() -> Result<()> {
    if !Path::new(KEYRING).exists() {
        bail!("{KEYRING} is missing: install Debian's package debian-archive-keyring");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_package_of_a_series_is_chosen_by_its_numbers() {
        let packages: Vec<String> = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.1.0-0.deb11.52-cloud-amd64",
            "linux-image-6.12.95+deb12-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64",
        ]
        .map(str::to_owned)
        .to_vec();
        let chosen = |version| choose(&packages, version).map(|name| &name[PREFIX.len()..]);
        assert_eq!(chosen("6.1"), Some("6.1.0-57-cloud-amd64"));
        assert_eq!(chosen("6.12"), Some("6.12.117+deb12-cloud-amd64"));
        assert_eq!(chosen("6.12.95"), Some("6.12.95+deb12-cloud-amd64"));
        assert_eq!(chosen(NEWEST), Some("7.3.4+deb13-cloud-amd64"));
        assert_eq!(chosen("5.10"), None);
        assert_eq!(series(&packages), "6.1, 6.12, 7.3");
    }

    #[test]
    fn what_is_no_version_is_refused() {
        for good in ["6.1", "6.12.117", NEWEST] {
            assert_eq!(parse(good).expect("a version"), good);
        }
        for bad in ["6", "6.", "latest", "6.1-rc", "../6.1", ""] {
            parse(bad).expect_err(bad);
        }
    }
}
