//! Which requests of a leader an answer of this node's copy belongs to.
//!
//! The copy says what it has done, to whom and in which epoch; it knows no requests. Here is which ones wait:
//!
//! | what the copy says | what it answers |
//! |---|---|
//! | Named | every Superblock with this number or a lower one |
//! | Fenced | everything of the log in this epoch or a lower one |
//! | LogData, Verified, NotWhole, HasCut, Echo | the request with the same point, cut or number |
//! | Attached, Promised, Joining | the request |
//!
//! What the copy will never answer ends with Nothing, so that the leader does not wait for it:
//! 1. requests of a lower epoch than a later request for the log;
//! 2. a request of the same kind in the same epoch, but for Superblock, when the next one comes;
//! 3. once it has promised or was cut: Superblock and Verify that came before; after a cut Promise too.

use std::collections::BTreeMap;

use hdcs_core::replication::message::Message;
use hdcs_core::wire::Purpose;
use hdcs_core::wire::replication::{About, LogName, Question};

/// A request that waits for its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Which log and epoch.
    pub about: About,
    /// What is asked.
    pub message: Message,
    /// Its number on its connection.
    pub request: u64,
    /// The connection that it came over.
    pub purpose: Purpose,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Questions {
    /// In the order in which they came.
    pending: BTreeMap<LogName, Vec<Pending>>,
}

impl Questions {
    /// A request has come; those that it ends.
    pub fn ask(&mut self, asked: Pending) -> Vec<Pending> {
        let question = Question::of(&asked.message);
        let epoch = asked.about.epoch;
        let ended = self.take(asked.about.log, |one| {
            let is_same = one.about.epoch == epoch && Question::of(&one.message) == question;
            one.about.epoch < epoch || is_same && question != Some(Question::Superblock)
        });
        let log = self.pending.entry(asked.about.log).or_default();
        log.push(asked);
        ended
    }

    /// The copy says this: the requests that it answers, and those that end with it unanswered.
    pub fn answer(&mut self, about: About, said: &Message) -> (Vec<Pending>, Vec<Pending>) {
        let answered = self.take(about.log, |one| match said {
            Message::Fenced { .. } => one.about.epoch <= about.epoch,
            _ => one.about.epoch == about.epoch && answers(said, &one.message),
        });
        let last = answered.iter().map(|one| one.request).max();
        let Some(last) = last else {
            return (answered, Vec::new());
        };
        let ended = self.take(about.log, |one| {
            let is_before = one.about.epoch == about.epoch && one.request < last;
            is_before && is_ended_by(said, &one.message)
        });
        (answered, ended)
    }

    /// The request of this kind, which has no answer.
    pub fn give_up(&mut self, about: About, question: Question) -> Vec<Pending> {
        self.take(about.log, |one| {
            one.about == about && Question::of(&one.message) == Some(question)
        })
    }

    /// Everything that was asked about a log that this node does not have.
    pub fn give_up_log(&mut self, log: LogName) -> Vec<Pending> {
        self.pending.remove(&log).unwrap_or_default()
    }

    fn take(&mut self, log: LogName, is_to_go: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        let Some(pending) = self.pending.get_mut(&log) else {
            return Vec::new();
        };
        let taken = pending.extract_if(.., |one| is_to_go(one)).collect();
        if pending.is_empty() {
            self.pending.remove(&log);
        }
        taken
    }
}

/// Whether the copy says this in answer to that, in the same epoch.
pub fn answers(said: &Message, asked: &Message) -> bool {
    match (said, asked) {
        (Message::Attached(_), Message::Attach)
        | (Message::Promised(_), Message::Promise { .. })
        | (Message::Joining { .. }, Message::Join) => true,
        (Message::Echo { number }, Message::Beat { number: asked, .. }) => number == asked,
        (Message::Named { number }, Message::Superblock(change)) => change.number <= *number,
        (Message::HasCut(cut), Message::JoinAt(asked)) => cut == asked,
        (Message::LogData(span), Message::ReadLog { after }) => span.start == *after,
        (
            Message::Verified { up_to } | Message::NotWhole { up_to },
            Message::Verify { up_to: asked },
        ) => up_to == asked,
        _ => false,
    }
}

/// Whether what was asked before is never answered once the copy has said this.
fn is_ended_by(said: &Message, asked: &Message) -> bool {
    match said {
        Message::Promised(_) => matches!(asked, Message::Superblock(_) | Message::Verify { .. }),
        Message::HasCut(_) => matches!(
            asked,
            Message::Superblock(_) | Message::Verify { .. } | Message::Promise { .. }
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::replication::message::{Change, Copy, Cut};
    use hdcs_core::replication::{Point, SpanId};

    use super::*;

    fn about(epoch: u64) -> About {
        About {
            log: LogName {
                volume: [1; 16],
                number: 2,
            },
            epoch,
        }
    }

    fn point(position: u64) -> Point {
        Point { position, chain: 1 }
    }

    fn superblock(number: u64) -> Message {
        Message::Superblock(Change {
            number,
            ..Change::default()
        })
    }

    fn copy() -> Copy {
        Copy {
            promised: 5,
            head: point(1),
            tail: point(0),
            sync_points: 0,
            incarnation: 1,
            is_unflushed: false,
            joined: 1,
            is_whole: true,
            lease_left_ms: 0,
        }
    }

    /// Ask these in turn, as requests 0, 1, and so on; the numbers of those that were ended.
    fn ask(questions: &mut Questions, asked: &[(u64, Message)]) -> Vec<u64> {
        let mut ended = Vec::new();
        for (request, (epoch, message)) in asked.iter().enumerate() {
            ended.extend(numbers(&questions.ask(Pending {
                about: about(*epoch),
                message: message.clone(),
                request: request as u64,
                purpose: Purpose::Spans,
            })));
        }
        ended
    }

    fn numbers(pending: &[Pending]) -> Vec<u64> {
        pending.iter().map(|one| one.request).collect()
    }

    fn answer(questions: &mut Questions, epoch: u64, said: &Message) -> (Vec<u64>, Vec<u64>) {
        let (answered, ended) = questions.answer(about(epoch), said);
        (numbers(&answered), numbers(&ended))
    }

    #[test]
    fn change_that_is_durable_answers_all_before_it() {
        let mut questions = Questions::default();
        let asked = [1, 2, 3].map(|number| (5, superblock(number)));
        assert!(ask(&mut questions, &asked).is_empty());
        let named = |number| Message::Named { number };
        assert_eq!(answer(&mut questions, 4, &named(3)), (vec![], vec![]));
        assert_eq!(answer(&mut questions, 5, &named(2)), (vec![0, 1], vec![]));
        assert_eq!(answer(&mut questions, 5, &named(2)), (vec![], vec![]));
        assert_eq!(answer(&mut questions, 5, &named(9)), (vec![2], vec![]));
        assert!(questions.pending.is_empty());
    }

    #[test]
    fn answer_belongs_to_the_request_with_its_point() {
        let mut questions = Questions::default();
        let asked = [
            (5, Message::Attach),
            (5, Message::ReadLog { after: point(7) }),
            (5, Message::Verify { up_to: point(8) }),
        ];
        ask(&mut questions, &asked);
        let span = |start| SpanId {
            start: point(start),
            end: point(start + 1),
            blocks: 1,
            incarnation: 1,
            evidence: 0,
        };
        let other = Message::LogData(span(6));
        assert_eq!(answer(&mut questions, 5, &other), (vec![], vec![]));
        let data = Message::LogData(span(7));
        assert_eq!(answer(&mut questions, 5, &data), (vec![1], vec![]));
        let up_to = point(8);
        let read = Message::NotWhole { up_to };
        assert_eq!(answer(&mut questions, 5, &read), (vec![2], vec![]));
        let attached = Message::Attached(copy());
        assert_eq!(answer(&mut questions, 5, &attached), (vec![0], vec![]));
    }

    #[test]
    fn echo_answers_the_beat_of_its_number() {
        let mut questions = Questions::default();
        let beat = Message::Beat {
            number: 3,
            lease_ms: 2_000,
        };
        ask(&mut questions, &[(5, beat)]);
        let echo = |number| Message::Echo { number };
        assert_eq!(answer(&mut questions, 5, &echo(2)), (vec![], vec![]));
        assert_eq!(answer(&mut questions, 5, &echo(3)), (vec![0], vec![]));
    }

    #[test]
    fn later_epoch_and_later_question_end_what_was_asked_before() {
        let mut questions = Questions::default();
        let verify = |position| Message::Verify {
            up_to: point(position),
        };
        let asked = [(5, verify(1)), (5, verify(2)), (5, superblock(1))];
        assert_eq!(ask(&mut questions, &asked), [0]);
        let promise = Pending {
            about: about(6),
            message: Message::Promise { floor: point(0) },
            request: 9,
            purpose: Purpose::Spans,
        };
        assert_eq!(numbers(&questions.ask(promise)), [1, 2]);
        let promised = Message::Promised(copy());
        assert_eq!(answer(&mut questions, 6, &promised), (vec![9], vec![]));
    }

    #[test]
    fn cut_and_promise_end_what_the_copy_forgets_with_them() {
        let mut questions = Questions::default();
        let cut = Cut {
            at: point(3),
            void_before: 1,
            joined: 2,
            change: Change::default(),
        };
        let asked = [
            (5, superblock(1)),
            (5, Message::Promise { floor: point(0) }),
            (5, Message::JoinAt(cut)),
            (5, superblock(2)),
        ];
        ask(&mut questions, &asked);
        let has_cut = Message::HasCut(cut);
        assert_eq!(answer(&mut questions, 5, &has_cut), (vec![2], vec![0, 1]));
        let fenced = Message::Fenced { promised: 8 };
        assert_eq!(answer(&mut questions, 7, &fenced), (vec![3], vec![]));
    }

    #[test]
    fn what_has_no_answer_is_given_up() {
        let mut questions = Questions::default();
        let asked = [
            (5, Message::ReadLog { after: point(7) }),
            (5, Message::Attach),
        ];
        ask(&mut questions, &asked);
        let given_up = questions.give_up(about(5), Question::ReadLog);
        assert_eq!(numbers(&given_up), [0]);
        assert_eq!(numbers(&questions.give_up_log(about(5).log)), [1]);
        assert!(questions.give_up_log(about(5).log).is_empty());
    }
}
