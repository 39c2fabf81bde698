//! The suite over files and filters, and the wrapper that checks the contract.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::rc::Rc;

use hdcs_device::ring::Outcome;

use super::*;
use crate::{Backend, Capabilities, Opened, filters};

fn under(options: impl Fn(&Path) -> String) {
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path());
    let url = format!("file:{}/image?{options}", directory.path().display());
    contract(
        &|_, bytes, absent| crate::open(&url, bytes, absent),
        &mut |_| (),
    );
}

#[test]
fn file_direct() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file:{}/image", directory.path().display());
    run_url(&url, &mut |_| ()).unwrap();
    let again = run_url(&url, &mut |_| ()).unwrap_err().to_string();
    assert!(again.contains("would overwrite it"), "{again}");
}

#[test]
fn file_that_comes_while_it_is_looked_for_is_not_taken() {
    let directory = tempfile::tempdir().unwrap();
    let (path, target) = (
        directory.path().join("image"),
        directory.path().join("gone"),
    );
    // To look at it is to look at what it leads to, where nothing is; to make it is not.
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let url = format!("file:{}", path.display());
    let refused = crate::open(&url, BYTES, Absent::CreateNew).err();
    assert!(
        matches!(refused, Some(BackendError::Exists(_))),
        "{refused:?}"
    );
    assert!(path.is_symlink() && !target.exists());
}

#[test]
fn file_buffered() {
    under(|_| "direct=off".to_owned());
}

#[test]
fn delay() {
    under(|_| "delay_us=50&delay_jitter_us=100".to_owned());
}

#[test]
fn rate() {
    under(|_| "rate_mib=2000".to_owned());
}

#[test]
fn error_at_rest() {
    under(|_| "error_rate=0&error_kind=hang".to_owned());
}

#[test]
fn everything_stacked() {
    under(|directory| {
        format!(
            "delay_us=20&rate_mib=4000&error_file=/nonexistent/file&log={}",
            directory.join("log").display()
        )
    });
}

#[test]
fn replaced_image_is_refused() {
    struct Named(&'static str);
    impl Opened for Named {
        fn build(self: Box<Self>) -> Box<dyn Backend> {
            unreachable!("only its name is looked at")
        }
        fn identity(&self) -> Option<String> {
            Some(self.0.to_owned())
        }
    }
    let filters = filters::prepare(&filters::Options::default()).unwrap();
    let prepared = Prepared::over(Box::new(Named("image 7")), filters, BYTES);
    prepared.expect(None).unwrap();
    prepared.expect(Some("image 7")).unwrap();
    let error = prepared.expect(Some("image 3")).unwrap_err().to_string();
    assert!(
        error.contains("image 7") && error.contains("image 3"),
        "{error}"
    );
}

/// Ends the oldest of its operations at each poll, and never has more than it allows.
struct Slow {
    waiting: VecDeque<Operation>,
    most: Rc<Cell<usize>>,
}

impl Backend for Slow {
    fn submit(&mut self, _now: Nanos, operation: Operation, _port: &mut Port<'_>) {
        self.waiting.push_back(operation);
        self.most.set(self.most.get().max(self.waiting.len()));
    }

    fn completed(&mut self, _: Nanos, _: Token, outcome: Outcome, _: &mut Port<'_>) {
        unreachable!("it starts nothing that ends in {outcome:?}");
    }

    fn poll(&mut self, _now: Nanos, port: &mut Port<'_>) {
        if let Some(operation) = self.waiting.pop_front() {
            port.end(operation.token, Ok(Done::Written));
        }
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        (!self.waiting.is_empty()).then_some(Nanos(0))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            in_flight_max: 3,
            ..Capabilities::default()
        }
    }
}

#[test]
fn in_flight_is_bounded_and_in_order() {
    let most = Rc::new(Cell::new(0));
    let mut bench = Bench::over(Stack::new(
        Box::new(Slow {
            waiting: VecDeque::new(),
            most: Rc::clone(&most),
        }),
        BYTES,
    ));
    let ids: Vec<u64> = (0..20).map(|_| bench.start(Ask::Flush)).collect();
    assert_eq!(bench.stack.under_way(), 20);
    for (at, id) in ids.iter().enumerate() {
        bench.end(*id).unwrap();
        let later = &ids[at + 1..];
        assert!(later.iter().all(|later| !bench.has_ended(*later)));
    }
    assert_eq!(most.get(), 3);
    assert_eq!(bench.stack.under_way(), 0);
}

/// A file that blocks where it is asked for one thing, if only for a moment: but for so long that no timer of a busy machine
/// ends it before the thread has gone to sleep.
struct Blocking(&'static str, Box<dyn Backend>);

impl Backend for Blocking {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        if operation.ask.describe().0 == self.0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.1.submit(now, operation, port);
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        self.1.completed(now, token, outcome, port);
    }

    fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        self.1.poll(now, port);
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        self.1.next_wakeup()
    }

    fn capabilities(&self) -> Capabilities {
        self.1.capabilities()
    }
}

#[test]
fn backend_that_blocks_is_caught() {
    for what in [
        "", "read", "write", "zero", "discard", "flush", "extents", "resize",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("file:{}/image", directory.path().display());
        let place = BackendUrl::parse(&url).unwrap().place;
        let opened = place.open(BYTES, Absent::Create).unwrap();
        let blocking = Blocking(what, opened.build());
        let tried = catch_unwind(AssertUnwindSafe(|| {
            blocks_nowhere(&mut Bench::over(Stack::new(Box::new(blocking), BYTES)));
        }));
        let said = tried.err().and_then(|said| said.downcast::<String>().ok());
        let expected = said
            .as_ref()
            .is_some_and(|said| said.starts_with("rule 5") && said.ends_with(what));
        assert_eq!(expected, !what.is_empty(), "{what}: {said:?}");
    }
}

/// Can only be read; whoever asks it for more has overlooked that.
struct Frozen;

impl Backend for Frozen {
    fn submit(&mut self, _now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let done = match operation.ask {
            Ask::Read { buf, .. } => Done::Read(buf),
            Ask::Flush => Done::Written,
            other => unreachable!("it was asked for {other:?}"),
        };
        port.end(operation.token, Ok(done));
    }

    fn completed(&mut self, _: Nanos, _: Token, outcome: Outcome, _: &mut Port<'_>) {
        unreachable!("it starts nothing that ends in {outcome:?}");
    }

    fn poll(&mut self, _now: Nanos, _port: &mut Port<'_>) {}

    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: true,
            ..Capabilities::default()
        }
    }
}

#[test]
fn read_only_backend_is_never_asked_to_write() {
    let mut bench = Bench::over(Stack::new(Box::new(Frozen), BYTES));
    assert_eq!(bench.write(0, &[1; 4096]), Err(IoError::Failed));
    for unmap in [true, false] {
        let (offset, bytes) = (0, 4096);
        let zeroed = bench.ask(Ask::Zero {
            offset,
            bytes,
            unmap,
        });
        assert!(matches!(zeroed, Err(IoError::Failed)));
    }
    // Nor does it count as resized.
    assert!(bench.ask(Ask::Resize { bytes: 4096 }).is_err());
    bench.read(BYTES - 512, 512).unwrap();
    bench.ask(Ask::Flush).unwrap();
    assert_eq!(bench.stack.under_way(), 0);
}
