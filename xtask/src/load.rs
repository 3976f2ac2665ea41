//! `cargo xtask load`: from the source to a loaded data plane on a real interface in one step.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::exec::{
    Interrupt, Supervised, command, exec, interrupted, output, stage, target_directory,
};
use crate::setup;

/// Pins of an agent that was given no other root.
const PINS: &str = "/sys/fs/bpf/ironlb";
/// How long an agent may take to serve.
const PATIENCE: Duration = Duration::from_secs(30);
/// Keys by which an uplink is found; one of them is in every uplink.
const SELECTORS: [&str; 3] = ["subnet", "name", "mac"];

/// Options of `cargo xtask load`.
#[derive(clap::Args)]
pub struct Options {
    /// The interface on the provisioning network, e.g. `eth1`.
    #[arg(long, value_name = "NAME")]
    interface: String,
    /// What to serve; deploy/lb.yaml is an example.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// How to attach, instead of what the configuration says.
    #[arg(long, value_name = "MODE", value_parser = ["auto", "native", "tc"])]
    mode: Option<String>,
    /// Stop the agent once all is loaded; the data plane stays. Without it the agent stays in the foreground.
    #[arg(long)]
    once: bool,
}

/// Builds ironlb and runs its agent for one interface.
///
/// # Errors
/// When the configuration does not fit, or the agent does not come to serve it; then the agent is stopped.
pub fn run(options: Options) -> Result<()> {
    let Options {
        interface,
        config,
        mode,
        once,
    } = options;
    let config =
        std::path::absolute(&config).with_context(|| format!("resolve {}", config.display()))?;
    let text = fs::read_to_string(&config).with_context(|| format!("read {}", config.display()))?;
    setup::ensure()?;
    let link = addresses(&interface)
        .with_context(|| format!("there is no interface {interface} here; `ip link` lists them"))?;
    ensure!(
        !is_loopback(&link),
        "{interface} is the loopback, which cannot be an uplink: name the interface on the provisioning network"
    );
    stage("build ironlb", "a minute or two at first", || {
        exec(command("cargo").args(["build", "--package", "lb-userspace"]))
    })?;
    let ironlb = target_directory()?.join("ironlb");
    // Says what is wrong with its place in the file, which the copy below no longer has.
    exec(command(&ironlb).arg("check").arg(&config))?;
    let value: Value = serde_saphyr::from_str(&text)
        .with_context(|| format!("read {} as YAML", config.display()))?;
    on_link(&interface, link, &value)?;
    let config = for_interface(&config, value, &interface, mode.as_deref())?;

    let mut agent = Supervised::start(
        command(&ironlb)
            .arg("agent")
            .arg("--config")
            .arg(config.path()),
        Interrupt::Terminate,
    )?;
    let report = wait_until_it_serves(&ironlb, &mut agent).and_then(|report| {
        println!("\n{report}");
        look_inside(&ironlb)
    });
    if report.is_err() || once {
        agent.stop();
    } else {
        println!(
            "The agent runs in the foreground and follows changes of {}. Ctrl-C stops it;",
            config.path().display()
        );
        println!("the data plane stays loaded then and goes on serving.\n");
    }
    let ended = agent.wait();
    report?;
    match ended {
        Ok(status) if !status.success() => {
            bail!("the agent ended with {status}; what it said is above")
        }
        Err(error) if !interrupted() => return Err(error),
        _ => {}
    }
    println!(
        "The agent has stopped, the data plane is still loaded. To remove it: {} unload",
        ironlb.display()
    );
    Ok(())
}

/// What `ip` knows of an interface and its addresses.
fn addresses(interface: &str) -> Result<Value> {
    let said = output(command("ip").args(["-json", "address", "show", "dev", interface]))?;
    let mut said: Value = serde_json::from_str(&said).context("read the JSON of `ip address`")?;
    Ok(said[0].take())
}

fn is_loopback(link: &Value) -> bool {
    let flags = link["flags"].as_array();
    flags.is_some_and(|flags| flags.iter().any(|flag| flag == "LOOPBACK"))
}

/// Refuses an interface that has no address in the subnet of any VIP: the agent would wait there for ever.
fn on_link(interface: &str, link: Value, config: &Value) -> Result<()> {
    // The port of a bridge has the addresses of the bridge.
    let master = link["master"].as_str().map(addresses).transpose()?;
    let vips = vips(config);
    let links: Vec<_> = [Some(link), master].into_iter().flatten().collect();
    ensure!(
        vips.iter()
            .any(|vip| links.iter().any(|link| is_on_link(link, *vip))),
        "{interface} has no address in the subnet of a VIP of the configuration ({}), so nothing of it can be served there: \
         give it one (`ip address add ADDRESS/LENGTH dev {interface}`), or name another interface",
        match &vips[..] {
            [] => "it has none".to_owned(),
            vips => vips
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        }
    );
    Ok(())
}

fn vips(config: &Value) -> Vec<IpAddr> {
    let vips = config["vips"].as_array().into_iter().flatten();
    vips.filter_map(|vip| vip["address"].as_str()?.parse().ok())
        .collect()
}

fn is_on_link(link: &Value, vip: IpAddr) -> bool {
    let addresses = link["addr_info"].as_array().into_iter().flatten();
    let subnet = |address: &Value| {
        let length = address["prefixlen"].as_u64()?.try_into().ok()?;
        IpNet::new(address["local"].as_str()?.parse().ok()?, length).ok()
    };
    addresses
        .filter_map(subnet)
        .any(|subnet| subnet.contains(&vip))
}

/// The configuration to run.
enum Config {
    /// The user's own.
    Own(PathBuf),
    /// A copy, which goes with the value.
    Copy(PathBuf),
}

impl Config {
    fn path(&self) -> &Path {
        match self {
            Self::Own(path) | Self::Copy(path) => path,
        }
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        if let Self::Copy(copy) = self
            && let Err(error) = fs::remove_file(&copy)
        {
            eprintln!("cannot remove {}: {error}", copy.display());
        }
    }
}

/// The user's own configuration when its only uplink is `interface` by name already, else a copy that has just
/// this uplink.
fn for_interface(
    config: &Path,
    mut value: Value,
    interface: &str,
    mode: Option<&str>,
) -> Result<Config> {
    if !narrow(&mut value, interface, mode)? {
        return Ok(Config::Own(config.to_owned()));
    }
    let directory = Path::new("/run/ironlb");
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let copy = directory.join(format!("load-{interface}.yaml"));
    // JSON is YAML.
    fs::write(&copy, format!("{value:#}\n"))
        .with_context(|| format!("write {}", copy.display()))?;
    println!(
        "{} does not say exactly what was asked for; serving {} by a copy: {}",
        config.display(),
        interface,
        copy.display()
    );
    Ok(Config::Copy(copy))
}

/// Makes `interface` the one uplink of a configuration, attached in `mode` if one is given. Tells whether that
/// changed anything.
fn narrow(config: &mut Value, interface: &str, mode: Option<&str>) -> Result<bool> {
    let uplinks = config
        .get_mut("uplinks")
        .and_then(Value::as_array_mut)
        .context("the configuration has no `uplinks`")?;
    let named = uplinks
        .iter()
        .position(|uplink| uplink["name"] == interface);
    let at = match (named, uplinks.len()) {
        (Some(at), _) => at,
        (None, 1) => 0,
        (None, count) => bail!(
            "the configuration has {count} uplinks, and none of them says `name: {interface}`: \
             which of them is it? Name the interface in one"
        ),
    };
    let mut uplink: Map<String, Value> = uplinks[at]
        .as_object()
        .cloned()
        .context("an uplink of the configuration is not a mapping")?;
    if named.is_none() {
        uplink.retain(|key, _| !SELECTORS.contains(&key.as_str()));
        uplink.insert("name".to_owned(), json!(interface));
    }
    if let Some(mode) = mode {
        uplink.insert("mode".to_owned(), json!(mode));
    }
    let narrowed = vec![Value::Object(uplink)];
    let changed = *uplinks != narrowed;
    *uplinks = narrowed;
    Ok(changed)
}

/// Waits until the agent has everything loaded, and returns what `ironlb status` says then.
fn wait_until_it_serves(ironlb: &Path, agent: &mut Supervised) -> Result<String> {
    let pid = agent.child.id();
    let started = Instant::now();
    loop {
        ensure!(!interrupted(), "interrupted");
        if let Some(status) = agent
            .child
            .try_wait()
            .context("ask for the agent's state")?
        {
            bail!("the agent ended with {status} before it served; what it said is above");
        }
        let status = output(command(ironlb).args(["status", "-o", "json"]));
        let serving = status
            .ok()
            .and_then(|status| serde_json::from_str::<Value>(&status).ok())
            .is_some_and(|status| serves(&status, pid));
        if serving {
            return output(command(ironlb).arg("status"));
        }
        ensure!(
            started.elapsed() < PATIENCE,
            "the agent does not serve after {} s; what it said is above",
            PATIENCE.as_secs()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether a status is that of this agent after its first full round.
fn serves(status: &Value, pid: u32) -> bool {
    // What a former agent left has its times, in the maps that this one has adopted.
    let agent = &status["agent"];
    let since = |event: &str| agent[event].as_f64().unwrap_or(f64::INFINITY);
    agent["agent_pid"] == pid && since("synced_seconds") <= since("agent_started_seconds")
}

/// Says how to look into what is loaded now.
fn look_inside(ironlb: &Path) -> Result<()> {
    let pins = fs::read_dir(PINS)
        .with_context(|| format!("list {PINS}"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.join("services").exists())
        .with_context(|| format!("no maps are pinned below {PINS}"))?;
    let (ironlb, pins) = (ironlb.display(), pins.display());
    println!(
        "Look inside:
    for link in {pins}/links/*; do bpftool link show pinned $link; done    what is attached, by program
    bpftool prog show name ironlb_egress    a program, its size and its maps
    bpftool map dump pinned {pins}/services    VIP ports and their backends
    bpftool map dump pinned {pins}/verdicts    packets by verdict, per CPU
    {ironlb} services
    {ironlb} backends
    {ironlb} flows
Unload: {ironlb} unload
"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_becomes_the_interface_and_keeps_its_policy() {
        let mut config = json!({"uplinks": [{"subnet": "172.22.0.0/24", "bypass": "drop"}]});
        assert!(narrow(&mut config, "eth1", Some("tc")).expect("one uplink"));
        assert_eq!(
            config["uplinks"],
            json!([{"name": "eth1", "bypass": "drop", "mode": "tc"}])
        );
    }

    #[test]
    fn a_configuration_that_names_the_interface_is_used_as_it_is() {
        let mut config = json!({"uplinks": [{"name": "eth1", "mode": "auto"}]});
        assert!(!narrow(&mut config, "eth1", None).expect("named"));
    }

    #[test]
    fn only_the_named_one_of_several_uplinks_is_served() {
        let mut config = json!({"uplinks": [{"name": "eth0"}, {"name": "eth1"}]});
        assert!(narrow(&mut config, "eth1", None).expect("named"));
        assert_eq!(config["uplinks"], json!([{"name": "eth1"}]));
    }

    #[test]
    fn an_interface_serves_where_it_has_an_address_in_a_vips_subnet() {
        let config = json!({"vips": [{"address": "172.22.0.2"}, {"address": "10.0.0.2"}]});
        let link = |address: &str, length: u8| json!({"addr_info": [{"local": address, "prefixlen": length}]});
        let serves = |link: Value| on_link("eth1", link, &config);
        assert!(serves(link("10.0.0.9", 24)).is_ok());
        for link in [link("172.22.1.9", 24), link("fe80::1", 64), json!({})] {
            let error = serves(link).expect_err("not there").to_string();
            assert!(
                error.starts_with(
                    "eth1 has no address in the subnet of a VIP of the configuration (172.22.0.2, 10.0.0.2), \
                     so nothing of it can be served there: "
                ),
                "{error}"
            );
        }
    }

    #[test]
    fn a_copy_of_the_configuration_goes_when_it_is_not_used_any_more() {
        let copy = std::env::temp_dir().join(format!("ironlb-load-test-{}", std::process::id()));
        fs::write(&copy, "{}").expect("write");
        drop(Config::Own(copy.clone()));
        assert!(copy.exists());
        drop(Config::Copy(copy.clone()));
        assert!(!copy.exists());
    }

    #[test]
    fn a_former_agents_state_is_not_taken_for_the_new_ones() {
        let status = |pid, synced| json!({"agent": {"agent_pid": pid, "agent_started_seconds": 2.0, "synced_seconds": synced}});
        assert!(serves(&status(7, json!(1.5)), 7));
        assert!(!serves(&status(6, json!(1.5)), 7));
        assert!(!serves(&status(7, json!(60.0)), 7));
        assert!(!serves(&status(7, Value::Null), 7));
    }

    #[test]
    fn an_ambiguous_configuration_is_refused() {
        let mut config = json!({"uplinks": [{"name": "eth0"}, {"subnet": "10.0.0.0/8"}]});
        let error = narrow(&mut config, "eth1", None).expect_err("which one?");
        assert!(error.to_string().contains("name: eth1"), "{error}");
    }
}
