use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn service(annotations: Value, ingress: Value) -> Service {
    serde_json::from_value(json!({
        "metadata": {
            "namespace": "metal3", "name": "ironic", "resourceVersion": "7",
            "annotations": annotations,
        },
        "status": {"loadBalancer": {"ingress": ingress}},
    }))
    .expect("a Service")
}

fn vip(address: &str) -> Value {
    json!({"ip": address, "ipMode": "VIP"})
}

/// A Service of ours with one VIP.
fn ours() -> Outcome {
    Outcome {
        vips: BTreeSet::from([ip("172.22.0.2")]),
        assigned: Some("172.22.0.2".into()),
        ..Outcome::default()
    }
}

#[test]
fn a_service_shows_the_vips_that_are_served_and_no_others() {
    let told = json!({ASSIGNED_VIPS: "172.22.0.2"});
    let served = [ip("172.22.0.2")];
    let version = json!({"resourceVersion": "7"});
    let patch = |service: &Service, served: &[IpAddr]| changes(service, &ours(), served);

    let fresh = service(json!({}), Value::Null);
    assert_eq!(
        patch(&fresh, &[]),
        Some(json!({"metadata": {"resourceVersion": "7", "annotations": told}})),
        "it is given its VIP, and does not show it before it is served"
    );
    let known = service(told.clone(), Value::Null);
    assert_eq!(patch(&known, &[]), None);
    assert_eq!(
        patch(&known, &served),
        Some(json!({
            "metadata": version,
            "status": {"loadBalancer": {"ingress": [vip("172.22.0.2")]}},
        }))
    );
    let settled = service(told.clone(), json!([vip("172.22.0.2")]));
    assert_eq!(patch(&settled, &served), None);
    assert_eq!(
        patch(&settled, &[]),
        Some(json!({"metadata": version, "status": {"loadBalancer": {"ingress": null}}}))
    );
    // Whatever else it shows is wrong: the class is ours.
    let wrong = service(
        told,
        json!([{"ip": "172.22.0.2"}, {"hostname": "example.com"}]),
    );
    assert_eq!(
        patch(&wrong, &served).expect("a patch")["status"],
        json!({"loadBalancer": {"ingress": [vip("172.22.0.2")]}})
    );
}

#[test]
fn slots_are_written_when_they_are_to_change() {
    let told = json!({ASSIGNED_VIPS: "172.22.0.2", INSTANCE_SLOTS: "{\"a\":0}"});
    let service = service(told, Value::Null);
    assert_eq!(changes(&service, &ours(), &[]), None, "left as they are");
    let outcome = Outcome {
        slots: Some("{\"a\":0,\"b\":1}".into()),
        ..ours()
    };
    let patch = changes(&service, &outcome, &[]).expect("a patch");
    assert_eq!(
        patch,
        json!({"metadata": {"resourceVersion": "7", "annotations": {INSTANCE_SLOTS: "{\"a\":0,\"b\":1}"}}})
    );
}

#[test]
fn a_service_that_left_us_loses_what_we_wrote_and_nothing_else() {
    let outcome = Outcome {
        left: BTreeSet::from([ip("172.22.0.2")]),
        ..Outcome::default()
    };
    let annotations =
        json!({ASSIGNED_VIPS: "172.22.0.2", INSTANCE_SLOTS: "{}", "example.com/x": "y"});
    let others = json!({"ip": "192.0.2.1", "ipMode": "Proxy"});
    let service = service(annotations, json!([vip("172.22.0.2"), others]));
    assert_eq!(
        changes(&service, &outcome, &[]),
        Some(json!({
            "metadata": {"resourceVersion": "7", "annotations": {ASSIGNED_VIPS: null}},
            "status": {"loadBalancer": {"ingress": [others]}},
        }))
    );
}
