//! The competitor: a node's nftables as kube-proxy 1.36 programs them for a service of type LoadBalancer.
//!
//! `externalTrafficPolicy: Local`: it keeps the client's address, as ironlb does, and costs less than `Cluster`.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::process::Command;

use anyhow::Result;
use ironlb_tests::{API_PORT, IMAGE_PORT, Node, Pod, VIP, run_with_input};

/// Programs a node; the VIP becomes an address of it, so that the kernel answers for it.
pub fn program(node: &Node) -> Result<()> {
    node.namespace.ip(&format!("addr add {VIP}/32 dev lo"))?;
    let mut nft: Command = node.namespace.command("nft");
    run_with_input(nft.args(["-f", "-"]), &ruleset(node)).map(drop)
}

fn ruleset(node: &Node) -> String {
    let mut services = vec![
        (
            "api".to_owned(),
            API_PORT,
            API_PORT,
            node.pods.iter().collect::<Vec<_>>(),
        ),
        (
            "images".to_owned(),
            IMAGE_PORT,
            IMAGE_PORT,
            node.pods.iter().collect(),
        ),
    ];
    services.extend(node.pods.iter().map(|pod| {
        (
            pod.instance.clone(),
            pod.instance_port(),
            IMAGE_PORT,
            vec![pod],
        )
    }));
    let mut chains = String::new();
    let mut elements = Vec::new();
    for (name, port, target, pods) in &services {
        elements.push(format!("{VIP} . tcp . {port} : goto external-{name}"));
        write_service(&mut chains, name, *target, pods);
    }
    format!(
        "table ip kube-proxy {{
    set cluster-ips {{ type ipv4_addr; }}
    map no-endpoint-services {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
    map firewall-ips {{ type ipv4_addr . inet_proto . inet_service : verdict; }}
    map service-nodeports {{ type inet_proto . inet_service : verdict; }}
    chain mark-for-masquerade {{ meta mark set meta mark | 0x4000; }}
{chains}
    map service-ips {{
        type ipv4_addr . inet_proto . inet_service : verdict;
        elements = {{ {} }}
    }}
    chain firewall-check {{ ip daddr . meta l4proto . th dport vmap @firewall-ips; }}
    chain service-endpoints-check {{ ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }}
    chain cluster-ips-check {{ ip daddr @cluster-ips reject; }}
    chain services {{
        ip daddr . meta l4proto . th dport vmap @service-ips
        ip daddr {} meta l4proto . th dport vmap @service-nodeports
    }}
    chain masquerading {{
        meta mark & 0x4000 == 0 return
        meta mark set meta mark ^ 0x4000
        masquerade fully-random
    }}
    chain filter-prerouting {{
        type filter hook prerouting priority dstnat - 10; policy accept;
        ct state new jump firewall-check
    }}
    chain filter-forward {{
        type filter hook forward priority filter - 110; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }}
    chain nat-prerouting {{ type nat hook prerouting priority dstnat; policy accept; jump services; }}
    chain nat-output {{ type nat hook output priority -100; policy accept; jump services; }}
    chain nat-postrouting {{ type nat hook postrouting priority srcnat; policy accept; jump masquerading; }}
}}
",
        elements.join(", "),
        node.address,
    )
}

/// The chains of one service: external, choice, and one for each endpoint.
fn write_service(chains: &mut String, name: &str, target: u16, pods: &[&Pod]) {
    let mut choices = Vec::new();
    for (number, pod) in pods.iter().enumerate() {
        let address: Ipv4Addr = pod.address;
        let endpoint = format!("endpoint-{name}-{number}");
        // Writing to a String does not fail.
        let _ = writeln!(
            chains,
            "    chain {endpoint} {{
        ip saddr {address} jump mark-for-masquerade
        meta l4proto tcp dnat to {address}:{target}
    }}"
        );
        choices.push(format!("{number} : goto {endpoint}"));
    }
    let _ = writeln!(
        chains,
        "    chain local-{name} {{ numgen random mod {} vmap {{ {} }}; }}
    chain external-{name} {{ goto local-{name}; }}",
        pods.len(),
        choices.join(", ")
    );
}
