//! keepalived on nodes of the laboratory: somebody else who announces the VIP.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::laboratory::{Node, VIP};
use crate::process::Process;

/// Starts keepalived on a node: of those that run the one with the highest priority has the VIP, on the provisioning
/// port as its manual has it.
///
/// # Errors
/// When it cannot be started.
pub fn start_keepalived(node: &Node, directory: &Path, priority: u8) -> Result<Process> {
    let file = |what: &str| directory.join(format!("{}-keepalived.{what}", node.name));
    let config = format!(
        "global_defs {{\n  vrrp_garp_master_refresh 60\n}}\n\
         vrrp_instance ironic {{\n  state BACKUP\n  interface {uplink}\n  virtual_router_id 51\n  \
         priority {priority}\n  advert_int 1\n  nopreempt\n  virtual_ipaddress {{\n    {VIP}/24\n  }}\n}}\n",
        uplink = node.uplink,
    );
    let path = file("conf");
    fs::write(&path, config).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = node.namespace.command("keepalived");
    command
        .args(["--dont-fork", "--log-console", "--vrrp", "--use-file"])
        .arg(&path)
        .arg("--pid")
        .arg(file("pid"))
        .arg("--vrrp_pid")
        .arg(file("vrrp.pid"));
    Process::start(&mut command, "keepalived", &file("log"))
}
