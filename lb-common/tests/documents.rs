//! The documents say what the code does.

use lb_common::{Action, Verdict};

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
