//! Container images of the cluster, built with buildah and kept as OCI archives. Nothing is pulled from a
//! registry: they are made of this machine's programs, Debian's packages and PyPI's.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::binaries::binaries;
use super::cache::{Inputs, cached, stage};
use crate::command::run;

/// What Ironic's image is made of, besides Ironic itself.
const IRONIC_PACKAGES: &str =
    "python3,python3-venv,nginx-light,curl,iproute2,mariadb-server-core,mariadb-client-core";
/// Debian's release in Ironic's image.
const SUITE: &str = "bookworm";
/// Programs in the web image, from this machine with the libraries that they want.
const WEB_PROGRAMS: &[&str] = &["sh", "cat", "sleep", "head", "mkdir", "nginx", "curl"];
/// Certificates of whoever this machine trusts.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// An image that pods of the cluster can use, with `imagePullPolicy: Never`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerImage {
    /// `localhost/pause:test`, which holds pods' namespaces: on every node.
    Pause,
    /// `localhost/web:test`, a small real web server (nginx) with a shell and curl.
    Web,
    /// `localhost/ironic:test`: Ironic, an image server and MariaDB; takes some minutes at the first time.
    Ironic,
    /// An archive that is there already.
    Archive(PathBuf),
}

impl ContainerImage {
    /// Its OCI archive, built if it is not there yet.
    ///
    /// # Errors
    /// When something does not build; the message holds what buildah said.
    pub fn archive(&self) -> Result<PathBuf> {
        match self {
            Self::Pause => pause(),
            Self::Web => web(),
            Self::Ironic => ironic(),
            Self::Archive(path) => Ok(path.clone()),
        }
    }
}

/// A folder of this crate.
fn source(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("cluster")
        .join(folder)
}

fn pause() -> Result<PathBuf> {
    const DOCKERFILE: &str = "FROM scratch\nCOPY pause /pause\nENTRYPOINT [\"/pause\"]\n";
    let program = binaries()?.join("pause");
    let inputs = Inputs::default().path(&program)?.text(DOCKERFILE);
    cached("pause.tar", &inputs, |archive| {
        let context = Context::create(archive, DOCKERFILE)?;
        context.copy(&program, "pause")?;
        context.build("localhost/pause:test", &[])
    })
}

fn web() -> Result<PathBuf> {
    let source = source("web");
    let mut inputs = Inputs::default().path(&source)?;
    let mut files = Vec::new();
    for program in WEB_PROGRAMS {
        files.extend(with_libraries(program)?);
    }
    for file in &files {
        inputs = inputs.text(&file.to_string_lossy()).path(file)?;
    }
    cached("web.tar", &inputs, |archive| {
        let dockerfile = fs::read_to_string(source.join("Dockerfile"))?;
        let context = Context::create(archive, &dockerfile)?;
        for file in &files {
            let name = format!("root/{}", file.to_string_lossy().trim_start_matches('/'));
            context.copy(file, &name)?;
        }
        context.copy(&source.join("serve"), "root/usr/bin/serve")?;
        context.copy(&source.join("etc"), "root/etc")?;
        context.build("localhost/web:test", &[])
    })
}

fn ironic() -> Result<PathBuf> {
    let source = source("ironic");
    let options = format!("{SUITE} {IRONIC_PACKAGES}");
    let inputs = Inputs::default().text(&options).path(&source)?;
    cached("ironic.tar", &inputs, |archive| {
        let base = base()?;
        stage(
            "build Ironic's image (PyPI's packages and a database; two minutes, once)",
            || {
                let dockerfile = fs::read_to_string(source.join("Dockerfile"))?;
                let context = Context::create(archive, &dockerfile)?;
                for entry in fs::read_dir(&source)?.flatten() {
                    context.copy(&entry.path(), &entry.file_name().to_string_lossy())?;
                }
                fs::hard_link(&base, context.directory.join("base.tar"))
                    .with_context(|| format!("cannot link {}", base.display()))?;
                // pip asks an index on the network, perhaps behind a proxy that this machine trusts.
                let certificates = std::env::var("PIP_CERT").unwrap_or(CERTIFICATES.to_owned());
                let trust = format!("{certificates}:/build-certificates.pem:ro");
                context.build("localhost/ironic:test", &["--volume", &trust])
            },
        )
    })
}

/// Debian with what Ironic needs, as a tar of its files.
fn base() -> Result<PathBuf> {
    let inputs = Inputs::default().text(SUITE).text(IRONIC_PACKAGES);
    cached("base.tar", &inputs, |archive| {
        stage(
            "install Debian into Ironic's image (mmdebstrap; a minute, once)",
            || {
                let mut mmdebstrap = isolated("mmdebstrap");
                mmdebstrap
                    .args(["--quiet", "--format=tar", "--variant=minbase"])
                    .arg(format!("--include={IRONIC_PACKAGES}"));
                for folder in ["doc", "man", "locale"] {
                    mmdebstrap.arg(format!("--dpkgopt=path-exclude=/usr/share/{folder}/*"));
                }
                run(mmdebstrap.arg(SUITE).arg(archive)).map(drop)
            },
        )
    })
}

/// A command in mount and pid namespaces of its own: if it is killed, nothing of it stays mounted or runs.
fn isolated(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--",
        ])
        .arg(program);
    command
}

/// Where a program of this machine is, and the libraries that it wants, where the loader looks for them.
fn with_libraries(program: &str) -> Result<Vec<PathBuf>> {
    let found = ["/usr/bin", "/usr/sbin", "/bin"]
        .map(|directory| Path::new(directory).join(program))
        .into_iter()
        .find(|path| path.is_file())
        .with_context(|| {
            format!("{program} is not on this machine: run `cargo xtask setup --cluster`")
        })?;
    let libraries = run(Command::new("ldd").arg(&found))?;
    let libraries = libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from);
    Ok(std::iter::once(found.clone()).chain(libraries).collect())
}

/// A build context: a directory that goes with the value.
struct Context {
    directory: PathBuf,
    archive: PathBuf,
}

impl Context {
    /// For the image that shall be written to `archive`.
    fn create(archive: &Path, dockerfile: &str) -> Result<Self> {
        let directory = archive.with_extension("context");
        // Of a build that was interrupted.
        let _ = fs::remove_dir_all(&directory);
        let context = Self {
            archive: archive.to_owned(),
            directory,
        };
        fs::create_dir_all(&context.directory)
            .and_then(|()| fs::write(context.directory.join("Dockerfile"), dockerfile))
            .with_context(|| format!("cannot write {}", context.directory.display()))?;
        Ok(context)
    }

    fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.directory.join(to);
        let parent = to.parent().context("a file has a folder")?;
        fs::create_dir_all(parent)?;
        run(Command::new("cp")
            .args(["--recursive", "--dereference"])
            .args([from, &to]))
        .map(drop)
    }

    /// Builds the image `name` and writes its archive.
    fn build(&self, name: &str, options: &[&str]) -> Result<()> {
        // Of its own: nothing of it is worth keeping.
        let storage = self.storage();
        let configuration = storage.join("storage.conf");
        fs::create_dir_all(&storage)
            .and_then(|()| {
                let text = format!(
                    "[storage]\ndriver = \"overlay\"\ngraphroot = \"{0}/store\"\nrunroot = \"{0}/run\"\n",
                    storage.display()
                );
                fs::write(&configuration, text)
            })
            .with_context(|| format!("cannot write {}", configuration.display()))?;
        let buildah = |words: &[&OsStr]| {
            let mut command = isolated("buildah");
            command
                .args(words)
                .env("CONTAINERS_STORAGE_CONF", &configuration);
            run(&mut command)
        };
        let mut words: Vec<&OsStr> = ["bud", "--quiet", "--isolation", "chroot", "--tag", name]
            .map(OsStr::new)
            .into();
        words.extend(options.iter().map(OsStr::new));
        words.push(self.directory.as_os_str());
        buildah(&words)?;
        let destination = format!("oci-archive:{}:{name}", self.archive.display());
        // Nodes unpack it, more often than it is copied.
        let push = [
            "push",
            "--quiet",
            "--disable-compression",
            name,
            &destination,
        ];
        buildah(&push.map(OsStr::new)).map(drop)
    }

    fn storage(&self) -> PathBuf {
        self.archive.with_extension("storage")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The cache is not hurt by what stays of it.
        let _ = fs::remove_dir_all(&self.directory);
        let _ = fs::remove_dir_all(self.storage());
    }
}
