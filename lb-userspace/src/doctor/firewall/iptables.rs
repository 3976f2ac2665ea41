//! `iptables-save` and `ip6tables-save`.

use super::{Chain, Rule, Tool, Verdict};

/// Chains with their rules, in the order of the dump.
pub(super) fn parse(text: &str, tool: Tool) -> Vec<Chain> {
    let family = match tool {
        Tool::Ip6tables => "ip6",
        _ => "ip",
    };
    let mut chains: Vec<Chain> = Vec::new();
    let mut table = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name.trim().to_owned();
        } else if let Some(chain) = line.strip_prefix(':') {
            // :FORWARD DROP [0:0], and - for the policy of one that is jumped to.
            let mut words = chain.split_whitespace();
            let name = words.next().unwrap_or_default();
            let policy = words.next().unwrap_or_default();
            chains.push(Chain {
                tool,
                family: family.to_owned(),
                table: table.clone(),
                name: name.to_owned(),
                hook: (policy != "-").then(|| name.to_lowercase()),
                drops: policy == "DROP",
                rules: Vec::new(),
            });
        } else if line.starts_with("-A ") {
            let words = words(line);
            let mut words = words.iter().map(String::as_str).skip(1);
            let name = words.next().unwrap_or_default();
            let rule = rule(words);
            let is_here = |chain: &&mut Chain| chain.table == table && chain.name == name;
            if let Some(chain) = chains.iter_mut().find(is_here) {
                chain.rules.push(rule);
            }
        }
    }
    chains
}

/// Words of a line; what is quoted is one word.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut is_quoted = false;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => {
                is_quoted = !is_quoted;
                word.get_or_insert_default();
            }
            '\\' if is_quoted => word.get_or_insert_default().extend(letters.next()),
            ' ' if !is_quoted => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

fn rule<'a>(mut words: impl Iterator<Item = &'a str>) -> Rule {
    let mut rule = Rule::default();
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default().to_owned();
        match word {
            "-i" => rule.iif = Some(value()),
            "-o" => rule.oif = Some(value()),
            "-d" => rule.destination = Some(value()),
            "-p" => rule.not_tcp = value() != "tcp",
            "--ctstate" | "--state" => {
                rule.states = value()
                    .to_lowercase()
                    .split(',')
                    .map(str::to_owned)
                    .collect();
            }
            "--dport" | "--dports" | "--destination-port" | "--destination-ports" => {
                rule.ports = value().split(',').filter_map(range).collect();
            }
            "-j" | "-g" => {
                rule.verdict = match value().as_str() {
                    "ACCEPT" => Verdict::Accept,
                    "DROP" | "REJECT" => Verdict::Drop,
                    "DNAT" | "REDIRECT" => Verdict::Dnat,
                    "RETURN" | "LOG" | "NFLOG" | "MARK" | "CONNMARK" | "MASQUERADE" | "SNAT"
                    | "TCPMSS" | "CT" => Verdict::Continue,
                    "NFQUEUE" => Verdict::Unknown,
                    chain => Verdict::Jump(chain.to_owned()),
                };
            }
            // What these bring is understood, or says nothing about packets.
            "-m" => match value().as_str() {
                "comment" | "conntrack" | "state" | "tcp" | "udp" | "multiport" => {}
                _ => rule.more = true,
            },
            "--comment" | "--to-destination" | "--reject-with" | "--to-ports" => drop(value()),
            // A negation, or a condition of another module.
            _ => rule.more = true,
        }
    }
    rule
}

/// `6200`, `6200:6231`.
fn range(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    Some((first.parse().ok()?, last.parse().ok()?))
}
