//! Every program of the object, through the product's own loading code.

use std::path::PathBuf;

use anyhow::{Result, bail};
use aya::util::KernelVersion;
use ironlb::dataplane::{self, Options};
use lb_common::layout::program;
use serde_json::{Value, json};

/// Multi-buffer XDP came with Linux 5.18: only older kernels may refuse the program that has it.
const FRAGS_SINCE: KernelVersion = KernelVersion::new(5, 18, 0);

/// A report of each.
pub fn load_all(kernel: KernelVersion) -> Vec<Value> {
    load(kernel).unwrap_or_else(|error| {
        let why = format!("{error:#}");
        let failed = |name| json!({"program": name, "ok": false, "said": why});
        program::ALL.map(failed).to_vec()
    })
}

fn load(kernel: KernelVersion) -> Result<Vec<Value>> {
    let options = Options {
        bpffs: PathBuf::from("/sys/fs/bpf/ironlb-programs"),
        ..Options::default()
    };
    let programs = dataplane::load_all(&options)?;
    let reports = programs.into_iter().map(|loaded| {
        let name = loaded.name;
        let optional = name == program::XDP && kernel < FRAGS_SINCE;
        match loaded.instructions {
            Ok(instructions) => json!({"program": name, "ok": true, "instructions": instructions}),
            Err(error) if optional => json!({
                "program": name, "ok": true, "lacks": "no multi-buffer XDP before 5.18", "said": last_lines(&error.to_string()),
            }),
            Err(error) => {
                eprintln!("{error}");
                json!({"program": name, "ok": false, "said": last_lines(&error.to_string())})
            }
        }
    });
    let reports = reports.collect();
    dataplane::unload(&options.bpffs)?;
    if options.bpffs.exists() {
        bail!("unload left {}", options.bpffs.display());
    }
    Ok(reports)
}

/// The verifier's log ends with what it minds.
fn last_lines(text: &str) -> String {
    const LINES: usize = 25;
    let lines: Vec<_> = text.lines().collect();
    let skipped = lines.len().saturating_sub(LINES);
    match skipped {
        0 => text.to_owned(),
        _ => format!(
            "{}\n… {skipped} lines …\n{}",
            lines[0],
            lines[skipped..].join("\n")
        ),
    }
}
