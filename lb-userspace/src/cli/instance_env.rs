//! `ironlb instance-env`: the URLs of one Ironic instance, for its own environment.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use clap::ValueEnum;
use hyper::{Method, StatusCode};

use super::{block_on, emit, in_full};
use crate::http::instances::InstanceAnswer;
use crate::http::{PORT, SELF_PATH, client};
use crate::interfaces;

/// Environment variables that hold the node's address, as the downward API gives it.
const NODE_ADDRESS: [&str; 2] = ["HOST_IP", "NODE_IP"];
/// How often the agent is asked.
const PERIOD: Duration = Duration::from_secs(1);
/// How often the log says that nothing has changed.
const REPEAT: Duration = Duration::from_secs(10);

/// Wait for this pod's instance ports and write the URLs that Ironic must use.
///
/// To be run as an init container: it asks the agent on its node, which knows the pod by its address
/// (no token is needed), waits until the pod has its slot, and writes a file of environment variables
/// for ironic-image. Everything that Ironic then tells to ramdisks and BMCs leads back to the instance
/// that said it.
#[derive(clap::Args)]
#[command(after_help = "\
Writes IRONIC_HTTP_URL, IRONIC_IPA_BASE_URL, IRONIC_EXTERNAL_HTTP_URL (https where there is a port group
for images over TLS), IRONIC_BASE_URL and IRONIC_EXTERNAL_CALLBACK_URL.

The agent's address: --agent, else $HOST_IP or $NODE_IP (downward API, status.hostIP; of several by comma,
as in status.hostIPs, the first), else the pod's default gateway.

Exit codes: 0 the file is written, 1 it is not: the last line says what was missing.

Examples:
  ironlb instance-env                                        port names as Metal3 has them
  ironlb instance-env --images images --images-tls images-tls --api api --api-https
  ironlb instance-env --vip 172.22.0.2 --external-vip 192.168.50.2    BMCs live on another network
  ironlb instance-env --external-vip fd00:22::2                       BMCs are told the IPv6 VIP of a dual stack
  set -a; . /shared/instance.env; exec /bin/runironic                 how a container uses it")]
pub(super) struct Arguments {
    /// The agent on this node: an address, or an address with a port.
    #[arg(long, value_name = "IP[:PORT]", value_parser = agent)]
    agent: Option<SocketAddr>,
    /// The file to write, `-` for standard output. Replaced as a whole.
    #[arg(
        short,
        long,
        value_name = "FILE",
        default_value = "/shared/instance.env"
    )]
    output: PathBuf,
    /// How the file is written.
    #[arg(long, value_enum, default_value_t = Format::Env)]
    format: Format,
    /// How long to wait.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    timeout: Duration,
    #[command(flatten)]
    wanted: Wanted,
}

#[derive(clap::Args)]
struct Wanted {
    /// Name of the Service port for images; it needs instance ports.
    #[arg(long, value_name = "NAME", default_value = "image-svc")]
    images: String,
    /// Name of the Service port for images over TLS: where it has instance ports, BMCs are sent there.
    #[arg(long, value_name = "NAME", default_value = "image-svc-tls")]
    images_tls: String,
    /// Name of the Service port for Ironic's API.
    #[arg(long, value_name = "NAME", default_value = "ironic-api")]
    api: String,
    /// The API speaks TLS.
    #[arg(long)]
    api_https: bool,
    /// The VIP that ramdisks use, where the pod is behind several [default: the one of the agent's address's version of
    /// IP].
    #[arg(long, value_name = "IP")]
    vip: Option<IpAddr>,
    /// The VIP that BMCs use [default: the same].
    #[arg(long, value_name = "IP")]
    external_vip: Option<IpAddr>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// `NAME=value`, for `set -a; . FILE` and for env files.
    Env,
    /// `export NAME='value'`, for `. FILE`.
    Export,
    /// A JSON object.
    Json,
}

/// Why there are no URLs.
#[derive(Debug, PartialEq, Eq)]
enum Lack {
    /// Waiting may help.
    NotYet(String),
    /// Waiting does not help.
    Never(String),
}

/// Names and values, in the order in which they are written.
type Environment = Vec<(&'static str, String)>;

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments {
        agent,
        output,
        format,
        timeout,
        wanted,
    } = arguments;
    let agent = match agent {
        Some(agent) => *agent,
        None => find_agent()?,
    };
    let environment = block_on(wait(agent, *timeout, wanted))?;
    let text = write(&environment, *format)?;
    if output.as_path() == Path::new("-") {
        emit(&text)?;
    } else {
        replace(output, &text)?;
        eprintln!("ironlb: wrote {}:\n{}", output.display(), text.trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

fn agent(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, PORT));
    }
    text.parse()
        .map_err(|_| format!("`{text}` is neither an address nor an address with a port"))
}

fn find_agent() -> anyhow::Result<SocketAddr> {
    for name in NODE_ADDRESS {
        if let Some(address) = std::env::var_os(name).filter(|value| !value.is_empty()) {
            let addresses = address.to_string_lossy();
            let address = addresses.split(',').next().unwrap_or_default();
            return agent(address).map_err(|error| anyhow!("${name}: {error}"));
        }
    }
    let gateway = interfaces::default_gateway()?;
    let gateway = gateway.context(
        "where is the agent? Give the container HOST_IP from status.hostIP (downward API), or use --agent; \
         this pod has no default gateway to try (a link-local one is none)",
    )?;
    eprintln!("ironlb: neither --agent nor $HOST_IP: trying the default gateway {gateway}");
    Ok(SocketAddr::new(gateway, PORT))
}

async fn wait(
    agent: SocketAddr,
    patience: Duration,
    wanted: &Wanted,
) -> anyhow::Result<Environment> {
    let started = Instant::now();
    let mut told = (String::new(), started);
    eprintln!(
        "ironlb: asking the agent at {agent} for this pod's instance ports, for {} at most",
        humantime::format_duration(patience)
    );
    loop {
        let lack = match client::ask(agent, Method::GET, SELF_PATH, String::new()).await {
            Ok((status, body)) => match judge(status, &body, wanted) {
                Ok(environment) => return Ok(environment),
                Err(Lack::Never(why)) => bail!("{why}"),
                Err(Lack::NotYet(why)) => why,
            },
            Err(error) => in_full(&error),
        };
        let waited = started.elapsed();
        if waited >= patience {
            bail!(
                "gave up after {}: {lack}",
                humantime::format_duration(patience)
            );
        }
        if told.0 != lack || told.1.elapsed() >= REPEAT {
            eprintln!("ironlb: waiting ({} s): {lack}", waited.as_secs());
            told = (lack, Instant::now());
        }
        tokio::time::sleep(PERIOD.min(patience.saturating_sub(waited))).await;
    }
}

/// What an answer of the agent means.
fn judge(status: StatusCode, body: &str, wanted: &Wanted) -> Result<Environment, Lack> {
    let said = body.trim_end();
    match status {
        StatusCode::OK => match serde_json::from_str(body) {
            Ok(answer) => environment(&answer, wanted),
            Err(error) => Err(Lack::Never(format!(
                "the agent's answer cannot be read ({error}); is it of another version? {said}"
            ))),
        },
        StatusCode::FORBIDDEN => Err(Lack::Never(format!("the agent refuses: {said}"))),
        _ => Err(Lack::NotYet(format!("{status}: {said}"))),
    }
}

/// The URLs of a pod.
fn environment(answer: &InstanceAnswer, wanted: &Wanted) -> Result<Environment, Lack> {
    let Wanted {
        images,
        images_tls,
        api,
        api_https,
        vip,
        external_vip,
    } = wanted;
    let on = |vip: IpAddr| {
        let all = answer.services.iter().chain(&answer.other_version);
        all.filter(move |service| service.vip == vip)
    };
    let own = |vip: IpAddr, name: &str| {
        on(vip).find_map(|service| service.instance_ports.get(name).copied())
    };
    let shared =
        |vip: IpAddr, name: &str| on(vip).find_map(|service| service.ports.get(name).copied());
    let vip = match vip {
        Some(vip) => *vip,
        None => {
            let vips: BTreeSet<IpAddr> = answer.services.iter().map(|s| s.vip).collect();
            let with_images: Vec<_> = vips
                .iter()
                .filter(|vip| own(**vip, images).is_some())
                .collect();
            match with_images[..] {
                [vip] => *vip,
                [] => return Err(no_slot(answer, images, None)),
                [..] => {
                    let list: Vec<_> = with_images.iter().map(ToString::to_string).collect();
                    return Err(Lack::Never(format!(
                        "this pod has instance ports `{images}` on several VIPs, {}: say with --vip which one ramdisks use",
                        list.join(", ")
                    )));
                }
            }
        }
    };
    let external = external_vip.unwrap_or(vip);
    let url =
        |scheme: &str, vip: IpAddr, port: u16| format!("{scheme}://{}", SocketAddr::new(vip, port));
    let images_url = |vip| {
        let port = own(vip, images).ok_or_else(|| no_slot(answer, images, Some(vip)))?;
        Ok(url("http", vip, port))
    };
    let api_url = |vip| {
        let port = shared(vip, api).ok_or_else(|| {
            Lack::NotYet(format!("no Service port `{api}` of this pod on VIP {vip}"))
        })?;
        Ok(url(if *api_https { "https" } else { "http" }, vip, port))
    };
    let images_here = images_url(vip)?;
    let images_external = match own(external, images_tls) {
        Some(port) => url("https", external, port),
        None => images_url(external)?,
    };
    Ok(vec![
        ("IRONIC_HTTP_URL", images_here.clone()),
        ("IRONIC_IPA_BASE_URL", images_here),
        ("IRONIC_EXTERNAL_HTTP_URL", images_external),
        ("IRONIC_BASE_URL", api_url(vip)?),
        ("IRONIC_EXTERNAL_CALLBACK_URL", api_url(external)?),
    ])
}

fn no_slot(answer: &InstanceAnswer, images: &str, vip: Option<IpAddr>) -> Lack {
    let known = answer.services.iter().chain(&answer.other_version);
    let known: Vec<_> = known
        .map(|service| {
            let slot = match service.slot {
                None => "no slot yet".to_owned(),
                Some(slot) => format!("slot {slot}"),
            };
            format!(
                "{} of {} on {}: {slot}",
                service.instance, service.service, service.vip
            )
        })
        .collect();
    let place = vip.map_or("where one is needed".to_owned(), |vip| {
        format!("on VIP {vip}")
    });
    Lack::NotYet(format!(
        "this pod has no instance port `{images}` {place} ({})",
        known.join("; ")
    ))
}

fn write(environment: &Environment, format: Format) -> anyhow::Result<String> {
    // Values are URLs of ours: no quote, blank or dollar is in them.
    let lines = |line: &dyn Fn(&str, &str) -> String| {
        environment
            .iter()
            .map(|(name, value)| line(name, value))
            .collect()
    };
    Ok(match format {
        Format::Env => lines(&|name, value| format!("{name}={value}\n")),
        Format::Export => lines(&|name, value| format!("export {name}='{value}'\n")),
        Format::Json => {
            let object = environment.iter();
            let object: serde_json::Map<_, _> = object
                .map(|(name, value)| ((*name).to_owned(), value.clone().into()))
                .collect();
            serde_json::to_string_pretty(&object)? + "\n"
        }
    })
}

/// Writes a file whole or not at all: who reads it may start at any moment.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let mut name = file
        .file_name()
        .context("--output names no file")?
        .to_owned();
    name.push(".new");
    let new = file.with_file_name(name);
    let written = fs::File::create(&new).and_then(|mut handle| {
        handle.write_all(text.as_bytes())?;
        handle.sync_all()?;
        fs::rename(&new, file)
    });
    written.with_context(|| {
        format!(
            "cannot write {}: is it in a volume that this container mounts and may write to?",
            file.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(service, VIP, slot, shared ports, instance ports)` of the pod.
    type Row<'a> = (
        &'a str,
        &'a str,
        Option<u32>,
        &'a [(&'a str, u16)],
        &'a [(&'a str, u16)],
    );

    fn answer(rows: &[Row<'_>]) -> InstanceAnswer {
        let ports = |ports: &[(&str, u16)]| {
            let ports = ports.iter();
            ports
                .map(|(name, port)| ((*name).to_owned(), *port))
                .collect()
        };
        let services = rows.iter().map(|(service, vip, slot, shared, own)| {
            crate::http::instances::InstanceService {
                service: (*service).to_owned(),
                vip: vip.parse().expect("an address"),
                instance: "ironic-1".to_owned(),
                slot: *slot,
                ports: ports(shared),
                instance_ports: ports(own),
            }
        });
        InstanceAnswer {
            address: "10.244.0.12".parse().expect("an address"),
            services: services.collect(),
            other_version: Vec::new(),
        }
    }

    fn wanted() -> Wanted {
        Wanted {
            images: "images".to_owned(),
            images_tls: "images-tls".to_owned(),
            api: "api".to_owned(),
            api_https: false,
            vip: None,
            external_vip: None,
        }
    }

    fn env(answer: &InstanceAnswer, wanted: &Wanted) -> String {
        let environment = environment(answer, wanted).expect("URLs");
        write(&environment, Format::Env).expect("text")
    }

    const SHARED: &[(&str, u16)] = &[("api", 6385), ("images", 6180)];

    #[test]
    fn an_instance_learns_its_own_image_port_and_the_shared_api() {
        let answer = answer(&[(
            "m/ironic",
            "172.22.0.2",
            Some(1),
            SHARED,
            &[("images", 6201)],
        )]);
        assert_eq!(
            env(&answer, &wanted()),
            "IRONIC_HTTP_URL=http://172.22.0.2:6201\n\
             IRONIC_IPA_BASE_URL=http://172.22.0.2:6201\n\
             IRONIC_EXTERNAL_HTTP_URL=http://172.22.0.2:6201\n\
             IRONIC_BASE_URL=http://172.22.0.2:6385\n\
             IRONIC_EXTERNAL_CALLBACK_URL=http://172.22.0.2:6385\n"
        );
    }

    #[test]
    fn with_tls_bmcs_are_sent_to_the_tls_group_and_ipv6_keeps_its_brackets() {
        let own = [("images", 6201), ("images-tls", 6301)];
        let answer = answer(&[("m/ironic", "fd2e:6f44:5dd8:b856::2", Some(1), SHARED, &own)]);
        let wanted = Wanted {
            api_https: true,
            ..wanted()
        };
        assert_eq!(
            env(&answer, &wanted),
            "IRONIC_HTTP_URL=http://[fd2e:6f44:5dd8:b856::2]:6201\n\
             IRONIC_IPA_BASE_URL=http://[fd2e:6f44:5dd8:b856::2]:6201\n\
             IRONIC_EXTERNAL_HTTP_URL=https://[fd2e:6f44:5dd8:b856::2]:6301\n\
             IRONIC_BASE_URL=https://[fd2e:6f44:5dd8:b856::2]:6385\n\
             IRONIC_EXTERNAL_CALLBACK_URL=https://[fd2e:6f44:5dd8:b856::2]:6385\n"
        );
    }

    #[test]
    fn bmcs_on_another_network_get_that_networks_vip() {
        let own: &[(&str, u16)] = &[("images", 6201)];
        let answer = answer(&[
            ("m/ironic", "172.22.0.2", Some(1), SHARED, own),
            (
                "m/bmc",
                "192.168.50.2",
                Some(1),
                SHARED,
                &[("images", 7201)],
            ),
        ]);
        let Err(Lack::Never(why)) = environment(&answer, &wanted()) else {
            panic!("two VIPs are no answer");
        };
        assert!(
            why.contains("172.22.0.2, 192.168.50.2") && why.contains("--vip"),
            "{why}"
        );
        let wanted = Wanted {
            vip: Some("172.22.0.2".parse().expect("an address")),
            external_vip: Some("192.168.50.2".parse().expect("an address")),
            ..wanted()
        };
        let env = env(&answer, &wanted);
        for line in [
            "IRONIC_HTTP_URL=http://172.22.0.2:6201",
            "IRONIC_EXTERNAL_HTTP_URL=http://192.168.50.2:7201",
            "IRONIC_BASE_URL=http://172.22.0.2:6385",
            "IRONIC_EXTERNAL_CALLBACK_URL=http://192.168.50.2:6385",
        ] {
            assert!(env.lines().any(|l| l == line), "no {line} in {env}");
        }
    }

    #[test]
    fn of_a_dual_stack_service_bmcs_may_get_the_other_version() {
        let own: &[(&str, u16)] = &[("images", 6201)];
        let mut answer = answer(&[
            ("m/ironic", "172.22.0.2", Some(1), SHARED, own),
            ("m/ironic", "fd00:22::2", Some(1), SHARED, own),
        ]);
        answer.other_version = answer.services.split_off(1);
        // Without options the version by which the agent was asked.
        assert!(!env(&answer, &wanted()).contains('['));
        let wanted = Wanted {
            external_vip: Some("fd00:22::2".parse().expect("an address")),
            ..wanted()
        };
        assert_eq!(
            env(&answer, &wanted),
            "IRONIC_HTTP_URL=http://172.22.0.2:6201\n\
             IRONIC_IPA_BASE_URL=http://172.22.0.2:6201\n\
             IRONIC_EXTERNAL_HTTP_URL=http://[fd00:22::2]:6201\n\
             IRONIC_BASE_URL=http://172.22.0.2:6385\n\
             IRONIC_EXTERNAL_CALLBACK_URL=http://[fd00:22::2]:6385\n"
        );
    }

    #[test]
    fn images_and_api_may_be_services_of_their_own_on_one_vip() {
        let answer = answer(&[
            ("m/api", "172.22.0.2", None, &[("api", 6385)], &[]),
            ("m/images", "172.22.0.2", Some(0), &[], &[("images", 6200)]),
        ]);
        assert!(env(&answer, &wanted()).contains("IRONIC_BASE_URL=http://172.22.0.2:6385\n"));
    }

    #[test]
    fn what_is_missing_is_said() {
        let not_yet = |answer: &InstanceAnswer, wanted: &Wanted| match environment(answer, wanted) {
            Err(Lack::NotYet(why)) => why,
            other => panic!("{other:?}"),
        };
        let without_slot = answer(&[("m/ironic", "172.22.0.2", None, SHARED, &[])]);
        let why = not_yet(&without_slot, &wanted());
        assert!(
            why.contains("`images`") && why.contains("no slot yet"),
            "{why}"
        );
        let own: &[(&str, u16)] = &[("images", 6201)];
        let without_api = answer(&[("m/ironic", "172.22.0.2", Some(1), &[], own)]);
        let why = not_yet(&without_api, &wanted());
        assert!(why.contains("`api`"), "{why}");
        let elsewhere = Wanted {
            external_vip: Some("192.168.50.2".parse().expect("an address")),
            ..wanted()
        };
        let with_all = answer(&[("m/ironic", "172.22.0.2", Some(1), SHARED, own)]);
        not_yet(&with_all, &elsewhere);
    }

    #[test]
    fn a_refusal_ends_the_wait_and_everything_else_does_not() {
        let judged = |status, body: &str| judge(status, body, &wanted()).expect_err("no URLs");
        assert!(matches!(
            judged(StatusCode::FORBIDDEN, "not a pod"),
            Lack::Never(_)
        ));
        assert!(matches!(
            judged(StatusCode::NOT_FOUND, "not yet"),
            Lack::NotYet(_)
        ));
        assert!(matches!(
            judged(StatusCode::INTERNAL_SERVER_ERROR, ""),
            Lack::NotYet(_)
        ));
        assert!(matches!(judged(StatusCode::OK, "<html>"), Lack::Never(_)));
    }

    #[test]
    fn the_file_is_replaced_as_a_whole_in_any_format() {
        let environment = vec![("A", "http://[::1]:1".to_owned()), ("B", "x".to_owned())];
        let text = |format| write(&environment, format).expect("text");
        assert_eq!(
            text(Format::Export),
            "export A='http://[::1]:1'\nexport B='x'\n"
        );
        let json: serde_json::Value = serde_json::from_str(&text(Format::Json)).expect("JSON");
        assert_eq!(json["A"], "http://[::1]:1");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("instance.env");
        replace(&file, "old, and longer\n").expect("written");
        replace(&file, "new\n").expect("written");
        assert_eq!(fs::read_to_string(&file).expect("read"), "new\n");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        let error = replace(&folder.path().join("none/instance.env"), "").expect_err("no folder");
        assert!(format!("{error:#}").contains("volume"), "{error:#}");
    }

    #[test]
    fn the_agents_address_may_come_with_a_port() {
        assert_eq!(
            agent("192.168.1.11").map(|a| a.to_string()).as_deref(),
            Ok("192.168.1.11:9469")
        );
        assert_eq!(
            agent("fd00::1").map(|a| a.to_string()).as_deref(),
            Ok("[fd00::1]:9469")
        );
        assert_eq!(
            agent("[fd00::1]:80").map(|a| a.to_string()).as_deref(),
            Ok("[fd00::1]:80")
        );
        agent("node-1").expect_err("a name is no address");
    }
}
