//! The kernel and the rights: what ironlb needs of any machine.

use std::fs;
use std::os::linux::fs::MetadataExt as _;
use std::path::Path;

use aya::util::KernelVersion;

use super::{Check, Finding};
use crate::dataplane::{
    self, DataplaneError, FRAGS_SINCE, MEMLOCK_REMEDY, NO_MEMLOCK_SINCE, TCX_SINCE,
};

/// The oldest kernel that has what the programs use.
const OLDEST: KernelVersion = KernelVersion::new(5, 10, 0);

/// Capabilities by their numbers in `linux/capability.h`.
const NET_ADMIN: u8 = 12;
const NET_RAW: u8 = 13;
const SYS_ADMIN: u8 = 21;
const SYS_RESOURCE: u8 = 24;
const PERFMON: u8 = 38;
const BPF: u8 = 39;

/// The kernel that runs; the oldest possible one where it does not tell.
pub(super) fn present() -> KernelVersion {
    KernelVersion::current().unwrap_or(KernelVersion::new(0, 0, 0))
}

/// What a process may do.
struct Rights {
    /// Who it is, for the message.
    who: String,
    /// Whether it is an agent, or runs as one would.
    is_agent: bool,
    /// Bits of its effective capabilities.
    effective: u64,
}

impl Rights {
    fn have(&self, capability: u8) -> bool {
        self.effective & 1 << capability != 0
    }
}

pub(super) fn look(bpffs: &Path) -> Vec<Finding> {
    let kernel = present();
    let rights = rights(bpffs);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let may_raise = rights
        .as_ref()
        .is_some_and(|rights| rights.have(SYS_RESOURCE));
    vec![
        judge_kernel(kernel),
        judge_btf(fs::metadata("/sys/kernel/btf/vmlinux").is_ok()),
        judge_bpffs(bpffs, dataplane::check_bpffs(bpffs), stranger(bpffs)),
        judge_rights(rights.as_ref()),
        judge_memlock(kernel, limit, may_raise),
    ]
}

fn judge_kernel(kernel: KernelVersion) -> Finding {
    let on = "";
    let newer = "boot Linux 6.6 or later";
    if kernel < OLDEST {
        let found = format!("Linux {kernel} is too old: ironlb needs 5.10 at least");
        return Finding::error(Check::Kernel, on, found, newer);
    }
    let mut lacks = Vec::new();
    if kernel < FRAGS_SINCE {
        lacks.push("no multi-buffer XDP (5.18): native mode takes an MTU of about 3,500 at most");
    }
    if kernel < TCX_SINCE {
        lacks.push(
            "no TCX (6.6): programs at TC are clsact filters, which end with the qdisc and may have others before them",
        );
    }
    if lacks.is_empty() {
        return Finding::ok(Check::Kernel, on, format!("Linux {kernel}"));
    }
    let found = format!("Linux {kernel}: {}", lacks.join("; "));
    Finding::warning(Check::Kernel, on, found, newer)
}

fn judge_btf(is_there: bool) -> Finding {
    match is_there {
        true => Finding::ok(Check::Btf, "", "the kernel describes its types"),
        false => Finding::warning(
            Check::Btf,
            "",
            "/sys/kernel/btf/vmlinux is not there: ironlb serves without, other tools such as bpftrace need it",
            "boot a kernel with CONFIG_DEBUG_INFO_BTF=y; in a container, mount /sys",
        ),
    }
}

/// The user whose directory the pin root is, if not this process's own: what an agent of this user would refuse. Who is
/// not root looks at others' roots as a rule.
fn stranger(root: &Path) -> Option<u32> {
    let own = rustix::process::geteuid();
    let owner = fs::symlink_metadata(root).ok()?.st_uid();
    (own.is_root() && owner != own.as_raw()).then_some(owner)
}

fn judge_bpffs(root: &Path, found: Result<(), DataplaneError>, stranger: Option<u32>) -> Finding {
    let on = root.display();
    match (found, stranger) {
        (Ok(()), Some(owner)) => {
            let found = format!(
                "it is user {owner}'s, who could lock it or put pins there: the agent refuses it"
            );
            Finding::error(Check::Bpffs, on, found, format!("rmdir {}", root.display()))
        }
        (Ok(()), None) => Finding::ok(Check::Bpffs, on, "on a bpffs"),
        (Err(DataplaneError::NotBpffs { path }), _) => {
            let found = format!("{} is not on a bpffs", path.display());
            let remedy = "mount -t bpf bpf /sys/fs/bpf";
            Finding::error(Check::Bpffs, on, found, remedy)
        }
        (Err(error), _) => Finding::skipped(Check::Bpffs, on, error.to_string()),
    }
}

/// Of the agent, where one runs that can be seen from here, else of this process.
fn rights(bpffs: &Path) -> Option<Rights> {
    let of = |process: &str| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        effective(&status)
    };
    let agent = dataplane::owner(bpffs).flatten();
    let agent = agent.and_then(|pid| {
        Some(Rights {
            who: format!("the agent (process {pid})"),
            is_agent: true,
            effective: of(&pid.to_string())?,
        })
    });
    agent.or_else(|| {
        Some(Rights {
            who: "this process".to_owned(),
            is_agent: rustix::process::geteuid().is_root(),
            effective: of("self")?,
        })
    })
}

/// The line of `/proc/PID/status` about effective capabilities (proc_pid_status(5)).
fn effective(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(value.trim(), 16).ok()
}

fn judge_rights(rights: Option<&Rights>) -> Finding {
    let Some(rights) = rights else {
        return Finding::skipped(
            Check::Rights,
            "",
            "/proc does not tell what processes may do",
        );
    };
    let needed = [
        (BPF, "CAP_BPF"),
        (NET_ADMIN, "CAP_NET_ADMIN"),
        (NET_RAW, "CAP_NET_RAW"),
        (PERFMON, "CAP_PERFMON"),
    ];
    // It includes what was taken out of it in Linux 5.8.
    let all = rights.have(SYS_ADMIN);
    let has = |capability| rights.have(capability) || all && [BPF, PERFMON].contains(&capability);
    let missing = needed
        .into_iter()
        .filter(|(capability, _)| !has(*capability));
    let missing: Vec<_> = missing.map(|(_, name)| name).collect();
    let who = &rights.who;
    match (&missing[..], rights.is_agent) {
        ([], _) => Finding::ok(Check::Rights, "", format!("{who} has all that is needed")),
        (missing, true) => {
            let found = format!("{who} lacks {}", missing.join(", "));
            let remedy = format!(
                "give the container or unit these capabilities: {}",
                needed.map(|(_, name)| name).join(", ")
            );
            Finding::error(Check::Rights, "", found, remedy)
        }
        (missing, false) => {
            let found = format!(
                "{who} lacks {}: what needs them could not be seen, and an agent that is started so cannot serve",
                missing.join(", ")
            );
            Finding::warning(Check::Rights, "", found, "sudo ironlb doctor")
        }
    }
}

/// `limit` in bytes, `None` for none.
fn judge_memlock(kernel: KernelVersion, limit: Option<u64>, may_raise: bool) -> Finding {
    let found = match limit {
        _ if kernel >= NO_MEMLOCK_SINCE => "maps do not count as locked memory on this kernel",
        None => "there is no limit",
        Some(_) if may_raise => "there is a limit, and the right to lift it",
        Some(limit) => {
            let found = format!(
                "maps count as locked memory before Linux 5.11: {limit} bytes are not enough, and may not be raised"
            );
            return Finding::error(Check::Memlock, "", found, MEMLOCK_REMEDY);
        }
    };
    Finding::ok(Check::Memlock, "", found)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::Status;
    use super::*;

    #[test]
    fn kernels_are_told_by_what_they_lack() {
        for (version, status, word) in [
            ((5, 4), Status::Error, "too old"),
            ((5, 10), Status::Warning, "multi-buffer"),
            ((5, 18), Status::Warning, "no TCX"),
            ((6, 6), Status::Ok, "Linux 6.6"),
        ] {
            let found = judge_kernel(KernelVersion::new(version.0, version.1, 0));
            assert_eq!(found.status, status, "{version:?}");
            assert!(found.found.contains(word), "{}", found.found);
        }
        let found = judge_kernel(KernelVersion::new(5, 18, 0)).found;
        assert!(!found.contains("multi-buffer"), "{found}");
    }

    #[test]
    fn missing_rights_are_an_error_of_an_agent_and_a_warning_to_who_looks() {
        let bits = |list: &[u8]| list.iter().fold(0_u64, |bits, bit| bits | 1 << bit);
        for (effective, is_agent, status, missing) in [
            (
                bits(&[BPF, NET_ADMIN, NET_RAW, PERFMON]),
                true,
                Status::Ok,
                "",
            ),
            (bits(&[SYS_ADMIN, NET_ADMIN, NET_RAW]), true, Status::Ok, ""),
            (
                bits(&[BPF, NET_ADMIN, PERFMON]),
                true,
                Status::Error,
                "CAP_NET_RAW",
            ),
            (
                bits(&[SYS_ADMIN]),
                true,
                Status::Error,
                "CAP_NET_ADMIN, CAP_NET_RAW",
            ),
            (0, false, Status::Warning, "CAP_BPF"),
        ] {
            let found = judge_rights(Some(&Rights {
                who: "it".to_owned(),
                is_agent,
                effective,
            }));
            assert_eq!(found.status, status, "{effective:x}");
            assert!(found.found.contains(missing), "{}", found.found);
        }
        assert_eq!(judge_rights(None).status, Status::Skipped);
        let status = "Name:\tironlb\nCapPrm:\t0\nCapEff:\t000000c000003000\n";
        assert_eq!(
            effective(status),
            Some(bits(&[BPF, NET_ADMIN, NET_RAW, PERFMON]))
        );
    }

    #[test]
    fn locked_memory_counts_on_old_kernels_only() {
        let old = KernelVersion::new(5, 10, 0);
        assert_eq!(judge_memlock(old, Some(65536), false).status, Status::Error);
        assert_eq!(judge_memlock(old, Some(65536), true).status, Status::Ok);
        assert_eq!(judge_memlock(old, None, false).status, Status::Ok);
        let new = KernelVersion::new(5, 11, 0);
        assert_eq!(judge_memlock(new, Some(65536), false).status, Status::Ok);
    }

    #[test]
    fn what_is_not_on_a_bpffs_has_the_command_that_mounts_one() {
        let root = Path::new("/sys/fs/bpf/ironlb");
        let path = PathBuf::from("/sys/fs/bpf");
        let found = judge_bpffs(root, Err(DataplaneError::NotBpffs { path }), None);
        assert_eq!(found.status, Status::Error);
        assert_eq!(
            found.remedy.as_deref(),
            Some("mount -t bpf bpf /sys/fs/bpf")
        );
        assert_eq!(judge_bpffs(root, Ok(()), None).status, Status::Ok);
        assert_eq!(judge_bpffs(root, Ok(()), Some(1000)).status, Status::Error);
        assert_eq!(judge_btf(false).status, Status::Warning);
    }
}
