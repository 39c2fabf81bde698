//! The conformance suite over every transport, each as it is and behind a transport that injects no fault.

mod support;

use hdcs_messenger::conformance::{End, check_all, memory};
use hdcs_messenger::faults::{Faulty, Plan};
use hdcs_messenger::transport::Plain;

use support::{Certificates, Socket, tcp, unix};

fn faultless<T: hdcs_messenger::transport::Transport>(inner: T) -> Faulty<T> {
    Faulty::new(inner, Plan::none())
}

fn plain(pair: fn() -> (Socket, Socket)) {
    check_all(&mut |one, two| {
        let (near, far) = pair();
        (End::new(one, Plain, near), End::new(two, Plain, far))
    });
    check_all(&mut |one, two| {
        let (near, far) = pair();
        let one = End::new(one, faultless(Plain), near);
        (one, End::new(two, faultless(Plain), far))
    });
}

#[test]
fn memory_conforms() {
    check_all(&mut |one, two| {
        let (near, far) = memory();
        (End::new(one, Plain, near), End::new(two, Plain, far))
    });
    check_all(&mut |one, two| {
        let (near, far) = memory();
        let one = End::new(one, faultless(Plain), near);
        (one, End::new(two, faultless(Plain), far))
    });
}

#[test]
fn unix_conforms() {
    plain(unix);
}

#[test]
fn tcp_conforms() {
    plain(tcp);
}

#[test]
fn tls_conforms() {
    let certificates = Certificates::new();
    check_all(&mut |one, two| {
        let ((near, far), (first, second)) = (tcp(), certificates.tls());
        (End::new(one, first, near), End::new(two, second, far))
    });
    check_all(&mut |one, two| {
        let ((near, far), (first, second)) = (tcp(), certificates.tls());
        let one = End::new(one, faultless(first), near);
        (one, End::new(two, faultless(second), far))
    });
}

#[test]
fn tls_in_memory_conforms() {
    let certificates = Certificates::new();
    check_all(&mut |one, two| {
        let ((near, far), (first, second)) = (memory(), certificates.tls());
        (End::new(one, first, near), End::new(two, second, far))
    });
}
