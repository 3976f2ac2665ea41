//! The documents say what the code does.

use lb_common::{Action, LAYOUT_VERSION, Verdict, map};

#[test]
fn every_verdict_is_explained_in_the_operations_manual() {
    let manual = include_str!("../../docs/OPERATIONS.md");
    for verdict in Verdict::ALL {
        let action = match verdict.action() {
            Action::Pass => "passes",
            Action::Drop => "dropped",
            Action::Transmit => "sent out",
            Action::Redirect => "redirected",
        };
        let (name, text) = (verdict.name(), verdict.explanation());
        let line = format!("| `{name}` | {action} | {text} |\n");
        assert!(
            manual.contains(&line),
            "docs/OPERATIONS.md lacks the line\n{line}"
        );
    }
}

#[test]
fn paths_of_pinned_maps_are_those_of_this_layout() {
    let documents = [
        include_str!("../../README.md"),
        include_str!("../../docs/KUBERNETES.md"),
        include_str!("../../docs/OPERATIONS.md"),
    ];
    let paths = documents
        .iter()
        .flat_map(|text| text.split("/bpf/ironlb/v").skip(1));
    let versions: Vec<&str> = paths.filter_map(|rest| rest.split('/').next()).collect();
    assert!(!versions.is_empty());
    for version in versions {
        assert_eq!(version, LAYOUT_VERSION.to_string());
    }
}

#[test]
fn every_map_is_in_the_table_of_maps() {
    let architecture = include_str!("../../docs/ARCHITECTURE.md");
    for name in map::ALL {
        let is_there = architecture
            .lines()
            .any(|line| line.starts_with('|') && line.contains(&format!("`{name}`")));
        assert!(is_there, "docs/ARCHITECTURE.md lacks the map {name}");
    }
}
