//! What an agent may not have: the right to lock as much memory as it likes.

use anyhow::{Context as _, Result, anyhow, ensure};
use aya::util::KernelVersion;
use ironlb_tests::{Agent, IMAGE_PORT, Laboratory, Node, VIP};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use crate::paths;

/// From here on maps do not count as locked memory.
const NO_LIMIT_SINCE: KernelVersion = KernelVersion::new(5, 11, 0);
/// The kernel's default before Linux 5.16.
const LOW: u64 = 64 << 10;

/// An agent that may lock little memory serves, or ends with what is missing and leaves nothing.
pub fn memlock(kernel: KernelVersion) -> Result<String> {
    let lab = Laboratory::builder().nodes_with_pods(1, 1).build()?;
    let node = &lab.nodes[0];
    node.write_config(&lab.config("tc"))?;
    let mut agent = limited(node)?;
    if kernel < NO_LIMIT_SINCE {
        let log = agent.refusal()?;
        for word in ["locked memory", "ulimit -l unlimited", "CAP_SYS_RESOURCE"] {
            ensure!(log.contains(word), "no `{word}` in: {log}");
        }
        ensure!(!node.bpffs.exists(), "it left {}", node.bpffs.display());
        return Ok("refused: the limit and its remedy are named".to_owned());
    }
    agent.wait_until_ready(node)?;
    let host = &lab.hosts[0].namespace;
    paths::download(host, &VIP.to_string(), IMAGE_PORT, &lab.image)?;
    paths::unload(node, &mut agent)?;
    Ok("serves: maps are no locked memory here".to_owned())
}

/// Starts an agent that may lock little memory and not change that. What takes the right away is a thread's own and goes
/// with it.
fn limited(node: &Node) -> Result<Agent> {
    std::thread::scope(|scope| {
        let start = || {
            remove_capability_from_bounding_set(CapabilitySet::SYS_RESOURCE)
                .context("give up CAP_SYS_RESOURCE")?;
            let before = getrlimit(Resource::Memlock);
            let low = Rlimit {
                current: Some(LOW),
                maximum: Some(LOW),
            };
            setrlimit(Resource::Memlock, low).context("lower the limit")?;
            let agent = Agent::spawn(node);
            setrlimit(Resource::Memlock, before).context("lift the limit")?;
            agent
        };
        let started = scope.spawn(start).join();
        started.map_err(|_| anyhow!("the thread panicked"))?
    })
}
