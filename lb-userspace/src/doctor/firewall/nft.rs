//! `nft -j list ruleset` (libnftables-json(5)).

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Chain, Rule, Tool, Verdict};

/// Chains with their rules, in the order of the ruleset.
pub(super) fn parse(text: &str) -> Result<Vec<Chain>, String> {
    let document: Value = serde_json::from_str(text)
        .map_err(|error| format!("`nft -j list ruleset` does not write JSON: {error}"))?;
    let items = document["nftables"].as_array();
    let items = items.ok_or("`nft -j list ruleset` does not write a ruleset")?;
    let mut chains: Vec<Chain> = Vec::new();
    for item in items {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if let Some(chain) = item.get("chain") {
            chains.push(Chain {
                tool: Tool::Nft,
                family: text(&chain["family"]),
                table: text(&chain["table"]),
                name: text(&chain["name"]),
                hook: chain["hook"].as_str().map(str::to_owned),
                drops: chain["policy"] == "drop",
                rules: Vec::new(),
            });
        }
        if let Some(rule) = item.get("rule") {
            let place = [&rule["family"], &rule["table"], &rule["chain"]].map(text);
            let is_here =
                |chain: &&mut Chain| [&chain.family, &chain.table, &chain.name] == place.each_ref();
            if let Some(chain) = chains.iter_mut().find(is_here) {
                chain.rules.extend(rules(&rule["expr"]));
            }
        }
    }
    Ok(chains)
}

/// A rule; several where a map gives several verdicts.
fn rules(expressions: &Value) -> Vec<Rule> {
    let mut rule = Rule::default();
    let mut mapped = Vec::new();
    for expression in expressions.as_array().into_iter().flatten() {
        let Some((kind, value)) = expression
            .as_object()
            .and_then(|object| object.iter().next())
        else {
            continue;
        };
        match kind.as_str() {
            "match" => condition(&mut rule, value),
            "vmap" => mapped.extend(map(value)),
            "accept" => rule.verdict = Verdict::Accept,
            "drop" | "reject" => rule.verdict = Verdict::Drop,
            "jump" | "goto" => rule.verdict = jump(value),
            "dnat" | "redirect" => rule.verdict = Verdict::Dnat,
            "return" | "counter" | "log" | "comment" | "mangle" | "masquerade" | "snat"
            | "notrack" => {}
            // One of iptables', a queue, a limit: it may or may not apply.
            _ => {
                rule.more = true;
                if kind == "xt" || kind == "queue" {
                    rule.verdict = Verdict::Unknown;
                }
            }
        }
    }
    let of_map = mapped.into_iter().map(|(states, verdict)| Rule {
        states,
        verdict,
        ..rule.clone()
    });
    let all: Vec<_> = of_map.collect();
    if all.is_empty() { vec![rule] } else { all }
}

fn jump(value: &Value) -> Verdict {
    let target = value["target"].as_str();
    target.map_or(Verdict::Unknown, |target| Verdict::Jump(target.to_owned()))
}

fn condition(rule: &mut Rule, value: &Value) {
    let (left, right) = (&value["left"], &value["right"]);
    let is_positive = value["op"] == "==" || value["op"] == "in";
    if !is_positive {
        rule.more = true;
        return;
    }
    let meta = left["meta"]["key"].as_str();
    let (protocol, field) = (
        left["payload"]["protocol"].as_str(),
        left["payload"]["field"].as_str(),
    );
    match (meta, left["ct"]["key"].as_str(), protocol, field) {
        (Some("iifname" | "iif"), ..) if right.is_string() => rule.iif = text(right),
        (Some("oifname" | "oif"), ..) if right.is_string() => rule.oif = text(right),
        (Some("l4proto"), ..) | (_, _, Some("ip" | "ip6"), Some("protocol" | "nexthdr")) => {
            rule.not_tcp = !texts(right).contains("tcp");
            // As good as no condition: everything of ours is TCP.
        }
        (_, Some("state"), ..) => rule.states = texts(right),
        (_, _, Some(protocol), Some("dport")) => {
            rule.not_tcp |= !["tcp", "th"].contains(&protocol);
            rule.ports = ports(right);
        }
        (_, _, Some("ip" | "ip6"), Some("daddr")) if right.is_string() => {
            rule.destination = text(right);
        }
        _ => rule.more = true,
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// One, or a list, or a set of texts.
fn texts(value: &Value) -> BTreeSet<String> {
    match value {
        Value::String(text) => [text.clone()].into(),
        Value::Array(list) => list.iter().flat_map(texts).collect(),
        Value::Object(object) => object.get("set").map(texts).unwrap_or_default(),
        _ => BTreeSet::new(),
    }
}

/// One, or a range, or a set of them.
fn ports(value: &Value) -> Vec<(u16, u16)> {
    let number = |value: &Value| value.as_u64().and_then(|port| u16::try_from(port).ok());
    if let Some(port) = number(value) {
        return vec![(port, port)];
    }
    if let Some(range) = value.get("range") {
        let range = number(&range[0]).zip(number(&range[1]));
        return range.into_iter().collect();
    }
    let all = value.get("set").unwrap_or(value).as_array();
    all.into_iter().flatten().flat_map(ports).collect()
}

/// States and verdicts of `ct state vmap { … }`; of maps by anything else the verdicts, under a condition that is not
/// understood.
fn map(value: &Value) -> Vec<(BTreeSet<String>, Verdict)> {
    let by_state = value["key"]["ct"]["key"] == "state";
    let pairs = value["data"]["set"].as_array();
    let pair = |pair: &Value| {
        let verdict = pair[1].as_object()?.iter().next()?;
        let verdict = match verdict.0.as_str() {
            "accept" => Verdict::Accept,
            "drop" => Verdict::Drop,
            "jump" | "goto" => jump(verdict.1),
            _ => return None,
        };
        let states = match by_state {
            true => texts(&pair[0]),
            // No state that conntrack has: it takes nothing for certain.
            false => ["?".to_owned()].into(),
        };
        Some((states, verdict))
    };
    pairs.into_iter().flatten().filter_map(pair).collect()
}
