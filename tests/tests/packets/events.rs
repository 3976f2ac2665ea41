//! What the programs tell of single flows and packets, from real packets: each kind of event, none while nobody
//! watches, and a flood that is kept back and counted.

use std::net::IpAddr;

use lb_common::events::{
    BY_CLIENT_FIN, BY_CLIENT_RESET, BY_GONE, BY_POD_FIN, BY_POD_RESET, CAPTURE, EVENT_DROP,
    EVENT_ENDED, EVENT_LIVING, EVENT_NEW, EVENT_REFUSAL, EVENTS_RING, Ending, Event, Watch,
};

use super::*;

/// A watch of everything that does not end by itself.
fn everything() -> Watch {
    Watch {
        until: u64::MAX,
        verdicts: u64::MAX,
        kinds: u32::MAX,
        per_second: 1000,
        ..Watch::default()
    }
}

fn watched() -> Engine {
    let mut engine = engine();
    engine.set_watch(everything()).expect("writes");
    engine
}

/// The one event since the last look.
#[track_caller]
fn one(engine: &mut Engine) -> Event {
    let events = engine.events().expect("events");
    let [event] = events[..] else {
        let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
        panic!("one event was to be told, but these kinds were: {kinds:?}");
    };
    event
}

#[track_caller]
fn one_ending(engine: &mut Engine) -> Ending {
    let endings = engine.endings().expect("endings");
    let [ending] = endings[..] else {
        panic!("one ending was to be told, but {} were", endings.len());
    };
    ending
}

fn captured(event: &Event) -> &[u8] {
    &event.frame[..event.captured as usize]
}

#[test]
fn a_flow_is_told_when_it_begins_lives_and_ends() {
    for name in FORWARD {
        let mut engine = watched();
        let syn = run(
            &mut engine,
            name,
            &to_vip(API, TCP_SYN),
            Verdict::ForwardedNew,
        );
        let pod = ends(&syn.frame).1;
        let event = one(&mut engine);
        assert_eq!(
            (event.kind, event.verdict),
            (EVENT_NEW, Verdict::ForwardedNew as u8)
        );
        assert!(event.flow.key == forward_key(API), "{name}");
        assert_eq!(
            (IpAddr::from(event.flow.pod), event.flow.pod_port),
            (pod.0.into(), pod.1)
        );
        assert_eq!(event.flow.service, 0);
        assert_eq!(event.flow.by, 0);

        let syn_ack = tcp(pod, (CLIENT, PORT), TCP_SYN | TCP_ACK, b"");
        run(
            &mut engine,
            program::EGRESS,
            &syn_ack,
            Verdict::RepliedYoung,
        );
        run(&mut engine, name, &to_vip(API, TCP_SYN), Verdict::Forwarded);
        run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
        assert_eq!(
            engine.events().expect("events").len(),
            0,
            "a known flow's packets are quiet"
        );
        let data = tcp(pod, (CLIENT, PORT), TCP_ACK, b"answer");
        run(&mut engine, program::EGRESS, &data, Verdict::RepliedYoung);
        let event = one(&mut engine);
        assert_eq!(event.kind, EVENT_LIVING);
        assert!(event.flow.key == forward_key(API), "{name}");
        assert_eq!(IpAddr::from(event.flow.pod), pod.0);

        for _ in 0..3 {
            run(&mut engine, name, &to_vip(API, TCP_ACK), Verdict::Forwarded);
            run(&mut engine, program::EGRESS, &data, Verdict::Replied);
        }
        assert_eq!(engine.events().expect("events").len(), 0);
        assert_eq!(engine.endings().expect("endings").len(), 0);
        let fin = to_vip(API, TCP_FIN | TCP_ACK);
        run(&mut engine, name, &fin, Verdict::Forwarded);
        let pod_fin = tcp(pod, (CLIENT, PORT), TCP_FIN | TCP_ACK, b"");
        run(&mut engine, program::EGRESS, &pod_fin, Verdict::Replied);
        let event = one(&mut engine);
        assert_eq!(event.kind, EVENT_ENDED);
        let ending = one_ending(&mut engine);
        assert!(ending == event.flow, "{name}: both rings say the same");
        assert_eq!(ending.by, BY_CLIENT_FIN);
        assert_eq!(ending.refusal, 0);
        assert!(ending.key == forward_key(API));
        assert_eq!(
            (IpAddr::from(ending.pod), ending.pod_port),
            (pod.0.into(), pod.1)
        );
        assert!(ending.at >= ending.started && ending.at - ending.started < 60_000_000_000);
        // Two SYNs, four segments of four bytes, a FIN with four.
        assert_eq!(ending.bytes_in, 2 * 54 + 5 * 58, "{name}");
        // What the reply entry has counted: it is made by the first segment, which is not in it.
        assert_eq!(ending.bytes_out, 3 * 60 + 54, "{name}");
    }
}

#[test]
fn an_ending_says_who_ended_it() {
    let fin = TCP_FIN | TCP_ACK;
    for name in FORWARD {
        let from_pod = |pod, flags| tcp(pod, (CLIENT, PORT), flags, b"");
        let mut engine = engine();
        let pod = establish(&mut engine, name, API);
        run(
            &mut engine,
            program::EGRESS,
            &from_pod(pod, fin),
            Verdict::Replied,
        );
        run(&mut engine, name, &to_vip(API, fin), Verdict::Forwarded);
        assert_eq!(one_ending(&mut engine).by, BY_POD_FIN, "{name}");

        establish_again(&mut engine, name);
        run(&mut engine, name, &to_vip(API, TCP_RST), Verdict::Forwarded);
        assert_eq!(one_ending(&mut engine).by, BY_CLIENT_RESET, "{name}");

        establish_again(&mut engine, name);
        let pod = IpAddr::from(living(&mut engine, API).expect("lives").addr);
        let IpAddr::V4(pod) = pod else { panic!("IPv4") };
        let reset = from_pod((pod, API), TCP_RST);
        run(&mut engine, program::EGRESS, &reset, Verdict::Replied);
        assert_eq!(one_ending(&mut engine).by, BY_POD_RESET, "{name}");

        establish_again(&mut engine, name);
        let pod = living(&mut engine, API).expect("lives").addr;
        let IpAddr::V4(pod) = pod.into() else {
            panic!("IPv4")
        };
        gone(&mut engine, u16::from(pod == POD1), (pod, API), 0);
        run(
            &mut engine,
            name,
            &to_vip(API, TCP_ACK),
            Verdict::RefusedGone,
        );
        let ending = one_ending(&mut engine);
        assert_eq!(ending.by, BY_GONE, "{name}");
        assert_eq!(ending.refusal, 1 + Verdict::RefusedGone as u8);
        assert_eq!(engine.events().expect("events").len(), 0, "nobody watches");
    }
}

#[test]
fn a_refusal_is_told_with_the_packet_as_it_came() {
    for name in FORWARD {
        let mut engine = watched();
        let frame = to_vip(6189, TCP_SYN);
        run(&mut engine, name, &frame, Verdict::RefusedNoService);
        let event = one(&mut engine);
        assert_eq!(event.kind, EVENT_REFUSAL);
        assert_eq!(event.verdict, Verdict::RefusedNoService as u8);
        assert!(event.flow.key == forward_key(6189));
        assert_eq!(event.length as usize, frame.len());
        assert_eq!(captured(&event), frame);
    }
}

#[test]
fn a_drop_is_told_with_the_beginning_of_its_packet() {
    for name in FORWARD {
        let mut engine = watched();
        let attempt = tcp((CLIENT, PORT), (POD0, API), TCP_SYN, &[7; 300]);
        run(&mut engine, name, &attempt, Verdict::DroppedBypass);
        let event = one(&mut engine);
        assert_eq!(
            (event.kind, event.verdict),
            (EVENT_DROP, Verdict::DroppedBypass as u8)
        );
        assert_eq!(event.length as usize, attempt.len());
        assert_eq!(captured(&event), &attempt[..CAPTURE]);
        assert_eq!(event.uplink, 0);
        let short = udp((VIP, 69), 40_000);
        run(&mut engine, name, &short, Verdict::DroppedProtocol);
        let event = one(&mut engine);
        let whole = short.len()
            - if name == program::INGRESS {
                0
            } else {
                short.len() % 2
            };
        assert_eq!(captured(&event), &short[..whole], "{name}");
    }
    let mut engine = watched();
    let unknown = tcp((POD0, API), (CLIENT, PORT), TCP_ACK, b"who?");
    run(
        &mut engine,
        program::EGRESS,
        &unknown,
        Verdict::DroppedReplyUnknown,
    );
    let event = one(&mut engine);
    assert_eq!(event.verdict, Verdict::DroppedReplyUnknown as u8);
    assert_eq!(captured(&event), unknown);
}

#[test]
fn nothing_is_told_to_nobody() {
    for (what, watch) in [
        ("never", Watch::default()),
        (
            "no longer",
            Watch {
                until: 1,
                ..everything()
            },
        ),
        (
            "of others alone",
            Watch {
                verdicts: 0,
                kinds: 0,
                ..everything()
            },
        ),
        (
            "of another client",
            Watch {
                client: Addr::from(VIP),
                ..everything()
            },
        ),
    ] {
        for name in FORWARD {
            let mut engine = engine();
            engine.set_watch(watch).expect("writes");
            let pod = establish(&mut engine, name, API);
            let reset = tcp(pod, (CLIENT, PORT), TCP_RST, b"");
            run(&mut engine, program::EGRESS, &reset, Verdict::Replied);
            run(
                &mut engine,
                name,
                &to_vip(6189, TCP_SYN),
                Verdict::RefusedNoService,
            );
            assert_eq!(engine.events().expect("events").len(), 0, "{what}, {name}");
            assert_eq!(engine.telling().expect("counters").suppressed, 0, "{what}");
            // The agent's ring does not ask.
            assert_eq!(one_ending(&mut engine).by, BY_POD_RESET);
        }
    }
}

#[test]
fn a_flood_of_syns_is_kept_back_and_counted() {
    const FLOOD: u16 = 200;
    for name in FORWARD {
        let mut engine = engine();
        let watch = Watch {
            per_second: 5,
            ..everything()
        };
        engine.set_watch(watch).expect("writes");
        for port in 0..FLOOD {
            let syn = tcp((CLIENT, 1024 + port), (VIP, API), TCP_SYN, b"");
            engine.run(name, &syn).expect("runs");
        }
        let told = engine.events().expect("events").len() as u64;
        let kept_back = engine.telling().expect("counters").suppressed;
        // A bucket each of the processors that the run was on, and what came in meanwhile.
        assert!((5..=50).contains(&told), "{name}: {told} told");
        assert_eq!(told + kept_back, u64::from(FLOOD), "{name}");
    }
}

#[test]
fn sampling_tells_some_and_counts_the_others() {
    let mut engine = engine();
    let watch = Watch {
        sample: 4,
        per_second: 100_000,
        ..everything()
    };
    engine.set_watch(watch).expect("writes");
    for port in 0..400 {
        let syn = tcp((CLIENT, 1024 + port), (VIP, API), TCP_SYN, b"");
        engine.run(program::XDP, &syn).expect("runs");
    }
    let told = engine.events().expect("events").len() as u64;
    assert!((40..=200).contains(&told), "{told} of 400");
    assert_eq!(told + engine.telling().expect("counters").suppressed, 400);
}

#[test]
fn what_finds_no_room_in_a_ring_is_counted() {
    let mut engine = engine();
    let watch = Watch {
        per_second: u32::MAX / 2000,
        ..everything()
    };
    engine.set_watch(watch).expect("writes");
    let room = u64::from(EVENTS_RING) / (size_of::<Event>() as u64 + 8);
    let sent = room + 100;
    let frame = to_vip(6189, TCP_RST);
    for _ in 0..sent {
        run(&mut engine, program::XDP, &frame, Verdict::DroppedReset);
    }
    let lost = engine.telling().expect("counters").lost;
    let told = engine.events().expect("events").len() as u64;
    assert!(lost >= 100, "{lost} lost");
    assert_eq!(told + lost, sent);
}
