use std::net::Ipv4Addr;
use std::time::Instant;

use tokio::net::TcpListener;

use super::*;
use crate::desired::{BackendSpec, ServiceSpec};

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PATIENCE: Duration = Duration::from_secs(10);

fn checked(port: u16, fail: u32, addresses: &[IpAddr]) -> DesiredState {
    let backend = |address: &IpAddr| BackendSpec {
        instance: address.to_string(),
        slot: None,
        address: *address,
        node: None,
        uid: String::new(),
        ready: true,
        draining: false,
        ports: None,
    };
    DesiredState {
        services: vec![ServiceSpec {
            precedence: 0,
            name: "ironic".into(),
            vip: [172, 22, 0, 2].into(),
            ports: vec![],
            instance_ports: vec![],
            client_affinity: false,
            source_ranges: None,
            health: Some(HealthSpec {
                tcp: port,
                interval: Duration::from_millis(50),
                fail,
            }),
            backends: addresses.iter().map(backend).collect(),
        }],
        ..DesiredState::default()
    }
}

async fn next(checks: &mut Checks) -> Change {
    let mut changes = timeout(PATIENCE, checks.changed())
        .await
        .expect("a change of health");
    assert_eq!(changes.len(), 1, "{changes:?}");
    changes.remove(0)
}

#[tokio::test]
async fn a_backend_goes_after_some_failures_and_returns_after_one_success() {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let port = listener.local_addr().expect("its number").port();
    let mut checks = Checks::default();
    checks.follow(&checked(port, 3, &[LOCAL]), |_| true);
    // It answers, as assumed: nothing to tell.
    assert!(
        timeout(Duration::from_millis(300), checks.changed())
            .await
            .is_err()
    );

    drop(listener);
    let closed = Instant::now();
    let change = next(&mut checks).await;
    assert!(
        change.to_string().starts_with(&format!(
            "backend 127.0.0.1 of service ironic does not answer on port {port}: Connection refused"
        )),
        "{change}"
    );
    assert!(
        closed.elapsed() >= Duration::from_millis(90),
        "three failures take two intervals at least"
    );
    assert!(!checks.health().is_up("ironic", LOCAL));

    let _listener = TcpListener::bind((LOCAL, port)).await.expect("the port");
    assert_eq!(next(&mut checks).await.failure, None);
    assert!(checks.health().is_up("ironic", LOCAL));
}

#[tokio::test]
async fn a_backend_that_was_never_asked_counts_as_its_source_says() {
    let mut checks = Checks::default();
    checks.follow(&checked(1, 1000, &[LOCAL]), |_| true);
    assert!(checks.health().is_up("ironic", LOCAL));
}

#[tokio::test]
async fn checks_end_with_their_backend_and_so_does_what_they_found() {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let port = listener.local_addr().expect("its number").port();
    let other = IpAddr::from([127, 0, 0, 2]);
    let mut checks = Checks::default();
    // Nothing listens on the other address.
    checks.follow(&checked(port, 1, &[LOCAL, other]), |_| true);
    assert_eq!(next(&mut checks).await.address, other);
    assert!(!checks.health().is_up("ironic", other));

    checks.follow(&checked(port, 1, &[]), |_| true);
    assert!(checks.health().is_up("ironic", other));
    while timeout(Duration::from_millis(200), listener.accept())
        .await
        .is_ok()
    {}
    assert!(
        timeout(Duration::from_millis(300), listener.accept())
            .await
            .is_err(),
        "still checked"
    );
}

#[tokio::test]
async fn another_way_to_check_keeps_what_is_known_until_it_has_an_answer() {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let port = listener.local_addr().expect("its number").port();
    let closed = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let closed_port = closed.local_addr().expect("its number").port();
    drop(closed);
    let mut checks = Checks::default();
    checks.follow(&checked(closed_port, 1, &[LOCAL]), |_| true);
    assert!(next(&mut checks).await.failure.is_some());
    checks.follow(&checked(port, 1, &[LOCAL]), |_| true);
    assert!(!checks.health().is_up("ironic", LOCAL), "not asked yet");
    let change = next(&mut checks).await;
    assert_eq!((change.port, change.failure), (port, None));
}

#[tokio::test]
async fn backends_that_die_together_are_one_batch() {
    let closed = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let port = closed.local_addr().expect("its number").port();
    drop(closed);
    let addresses: Vec<_> = (1..=200).map(|last| [127, 0, 1, last].into()).collect();
    let mut checks = Checks::default();
    checks.follow(&checked(port, 1, &addresses), |_| true);
    // The agent is busy for a moment.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let changes = timeout(PATIENCE, checks.changed())
        .await
        .expect("changes of health");
    let told: std::collections::BTreeSet<_> = changes.iter().map(|c| c.address).collect();
    assert_eq!(told, addresses.into_iter().collect());
}
