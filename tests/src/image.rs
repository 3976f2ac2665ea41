//! A big file to download: its content differs at every page, so that data out of place shows.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::run;

const MIB: usize = 1024 * 1024;

/// A file that every pod serves as [`Image::URL_PATH`].
#[derive(Clone, Debug)]
pub struct Image {
    /// Where it lies.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal.
    pub sha256: String,
}

impl Image {
    /// Path in the URL.
    pub const URL_PATH: &str = "/images/common.img";

    /// Writes a file of `mib` MiB.
    pub(crate) fn create(path: &Path, mib: u32) -> Result<Self> {
        let mut block = vec![0_u8; MIB];
        let mut word = 0x9e37_79b9_7f4a_7c15_u64;
        for bytes in block.chunks_exact_mut(8) {
            // xorshift64: incompressible is enough.
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut write = || -> std::io::Result<()> {
            let mut file = File::create(path)?;
            for number in 0..mib {
                for (page, bytes) in block.chunks_exact_mut(4096).enumerate() {
                    let place = u64::from(number) << 32 | page as u64;
                    bytes[..8].copy_from_slice(&place.to_le_bytes());
                }
                file.write_all(&block)?;
            }
            Ok(())
        };
        write().with_context(|| format!("cannot write {mib} MiB to {}", path.display()))?;
        let sum = run(Command::new("sha256sum").arg(path))?;
        let sha256 = sum.split_whitespace().next().unwrap_or_default().to_owned();
        Ok(Self {
            path: path.to_owned(),
            bytes: u64::from(mib) * MIB as u64,
            sha256,
        })
    }
}
