//! Who is at each end, and what each demands of the other.
//!
//! The side that connects says who it is, whom it expects, and which versions of the wire it speaks. The other side
//! compares that with its own cluster and with what it knows of the node, and so does the first with the answer. The
//! highest version that both speak counts. Whoever refuses says why, so that both ends have the same reason in their logs.
//!
//! Runs of a node are counted. One with a lower number than is known has ended, though it may not know; one with the same
//! number and another UUID is a copy of a data directory or of a machine.

use std::fmt;

use hdcs_core::wire::{
    BootId, ClusterId, Greeting, NodeId, Purpose, Refusal, WIRE_VERSION, WIRE_VERSION_OLDEST,
};

use crate::error::{Refused, Violation};

/// A run of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its cluster.
    pub cluster: ClusterId,
    /// The node.
    pub node: NodeId,
    /// Its number in the cluster.
    pub number: u32,
    /// This run of it.
    pub boot: BootId,
    /// How many there have been.
    pub boots: u64,
}

/// Versions of the wire, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Versions {
    /// Those that this program speaks.
    pub const KNOWN: Self = Self {
        oldest: WIRE_VERSION_OLDEST,
        newest: WIRE_VERSION,
    };

    /// None above `wire_version_max`, so that a program plays an older one; the oldest stays in any case.
    #[must_use]
    pub fn limited(self, wire_version_max: u16) -> Self {
        Self {
            newest: self.newest.min(wire_version_max).max(self.oldest),
            ..self
        }
    }

    /// The newest that both have.
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }

    fn contains(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.oldest, self.newest)
    }
}

/// What is known of a node before it is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Which node.
    pub node: NodeId,
    /// Its newest run, if there was one.
    pub boot: Option<(u64, BootId)>,
}

impl Known {
    /// Whether this run of the node may be spoken to.
    fn admits(&self, found: &Identity) -> Result<(), Refused> {
        match self.boot {
            Some((known, _)) if found.boots < known => Err(Refused::OlderBoot {
                node: found.node,
                known,
                found: found.boots,
            }),
            Some((known, boot)) if found.boots == known && found.boot != boot => {
                Err(Refused::SecondBoot {
                    node: found.node,
                    boots: known,
                })
            }
            _ => Ok(()),
        }
    }
}

/// This end, as it greets.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// Who it is.
    pub identity: Identity,
    /// What it speaks.
    pub versions: Versions,
    /// What the other side's requests may cost to begin with.
    pub credit_bytes: u64,
}

/// What the other end has said in its greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeted {
    /// Who it is.
    pub identity: Identity,
    /// Whom it expects; nobody: all zeroes.
    pub expected: NodeId,
    /// What it speaks.
    pub versions: Versions,
    /// What it has chosen, if it is its turn.
    pub version: u16,
    /// What the connection is for.
    pub purpose: Purpose,
    /// What this side's requests may cost to begin with.
    pub credit_bytes: u64,
}

/// Hello, or with a version Welcome.
pub fn greet(own: &Own, expected: NodeId, version: u16, purpose: Purpose) -> Greeting {
    let identity = &own.identity;
    Greeting {
        cluster: identity.cluster.0,
        node: identity.node.0,
        boot: identity.boot.0,
        expected: expected.0,
        boots: identity.boots.into(),
        credit_bytes: own.credit_bytes.into(),
        number: identity.number.into(),
        version_oldest: own.versions.oldest.into(),
        version_newest: own.versions.newest.into(),
        version: version.into(),
        purpose: purpose.code().into(),
        reserved: [0; 36],
    }
}

/// The versions in a greeting. They keep their place in every version of the wire.
pub fn versions(greeting: &Greeting) -> Versions {
    Versions {
        oldest: greeting.version_oldest.get(),
        newest: greeting.version_newest.get(),
    }
}

/// What a greeting says.
pub fn read(greeting: &Greeting) -> Result<Greeted, Violation> {
    let purpose = greeting.purpose.get();
    Ok(Greeted {
        identity: Identity {
            cluster: ClusterId(greeting.cluster),
            node: NodeId(greeting.node),
            number: greeting.number.get(),
            boot: BootId(greeting.boot),
            boots: greeting.boots.get(),
        },
        expected: NodeId(greeting.expected),
        versions: versions(greeting),
        version: greeting.version.get(),
        purpose: Purpose::from_code(purpose).ok_or(Violation::Purpose(purpose))?,
        credit_bytes: greeting.credit_bytes.get(),
    })
}

/// The version to be spoken with the sender of a Hello, by all that is known without asking for the node.
pub fn judge_hello(own: &Own, hello: &Greeted) -> Result<u16, Refused> {
    // First, so that nothing else of it need mean the same.
    let version = own.versions.common(hello.versions);
    let version = version.ok_or(Refused::Version {
        refuser: own.versions,
        refused: hello.versions,
    })?;
    judge_both(own, &hello.identity)?;
    if hello.expected != NodeId::default() && hello.expected != own.identity.node {
        return Err(Refused::Node {
            expected: hello.expected,
            found: own.identity.node,
        });
    }
    Ok(version)
}

/// Whether the sender of a Hello is who is known under its name.
pub fn judge_known(hello: &Greeted, known: Option<&Known>) -> Result<(), Refused> {
    let node = hello.identity.node;
    let known = known.ok_or(Refused::Unknown(node))?;
    if known.node != node {
        return Err(Refused::Taken {
            number: hello.identity.number,
            holder: known.node,
        });
    }
    known.admits(&hello.identity)
}

/// Whether the sender of a Welcome is who was expected; a version that was not offered is its mistake.
pub fn judge_welcome(
    own: &Own,
    known: &Known,
    welcome: &Greeted,
) -> Result<Result<u16, Refused>, Violation> {
    if !own.versions.contains(welcome.version) {
        return Err(Violation::Chosen {
            chosen: welcome.version,
            offered: own.versions,
        });
    }
    let found = &welcome.identity;
    let judged = judge_both(own, found).and_then(|()| {
        if found.node != known.node {
            return Err(Refused::Node {
                expected: known.node,
                found: found.node,
            });
        }
        known.admits(found)
    });
    Ok(judged.map(|()| welcome.version))
}

fn judge_both(own: &Own, found: &Identity) -> Result<(), Refused> {
    if found.cluster != own.identity.cluster {
        return Err(Refused::Cluster {
            refuser: own.identity.cluster,
            refused: found.cluster,
        });
    }
    if found.node == own.identity.node {
        return Err(Refused::Itself(found.node));
    }
    Ok(())
}

/// What is sent to whom is refused.
pub fn refusal(own: &Own, refused: &Refused) -> Refusal {
    let (reason, boots) = match refused {
        Refused::Version { .. } => (1, 0),
        Refused::Cluster { .. } => (2, 0),
        Refused::Node { .. } => (3, 0),
        Refused::Unknown(_) => (4, 0),
        Refused::OlderBoot { known, .. } => (5, *known),
        Refused::SecondBoot { boots, .. } => (6, *boots),
        Refused::Itself(_) => (7, 0),
        Refused::Certificate(_) => (8, 0),
        Refused::Stops => (9, 0),
        Refused::Taken { .. } => (10, 0),
        Refused::Many(_) => (11, 0),
    };
    let node = match refused {
        // Who was looked for here is somebody else than whoever is refused.
        Refused::Node { expected, found } if *found != own.identity.node => *expected,
        Refused::Taken { holder, .. } => *holder,
        _ => own.identity.node,
    };
    Refusal {
        reason: reason.into(),
        version_oldest: own.versions.oldest.into(),
        version_newest: own.versions.newest.into(),
        reserved_a: 0.into(),
        cluster: own.identity.cluster.0,
        node: node.0,
        boots: boots.into(),
        reserved_b: [0; 16],
    }
}

/// What the other side means by its refusal of this one, which has looked for `expected`; `None`: a reason that this
/// version does not know.
pub fn read_refusal(own: &Own, expected: Option<NodeId>, refusal: &Refusal) -> Option<Refused> {
    let (identity, node) = (&own.identity, NodeId(refusal.node));
    let boots = refusal.boots.get();
    Some(match refusal.reason.get() {
        1 => Refused::Version {
            refuser: Versions {
                oldest: refusal.version_oldest.get(),
                newest: refusal.version_newest.get(),
            },
            refused: own.versions,
        },
        2 => Refused::Cluster {
            refuser: ClusterId(refusal.cluster),
            refused: identity.cluster,
        },
        3 => match expected {
            Some(expected) => Refused::Node {
                expected,
                found: node,
            },
            None => Refused::Node {
                expected: node,
                found: identity.node,
            },
        },
        4 => Refused::Unknown(identity.node),
        5 => Refused::OlderBoot {
            node: identity.node,
            known: boots,
            found: identity.boots,
        },
        6 => Refused::SecondBoot {
            node: identity.node,
            boots,
        },
        7 => Refused::Itself(identity.node),
        8 => Refused::Certificate(identity.node),
        9 => Refused::Stops,
        10 => Refused::Taken {
            number: identity.number,
            holder: node,
        },
        11 => Refused::Many(identity.node),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(node: u8, boots: u64, versions: (u16, u16)) -> Own {
        Own {
            identity: Identity {
                cluster: ClusterId([1; 16]),
                node: NodeId([node; 16]),
                number: u32::from(node),
                boot: BootId([boots as u8; 16]),
                boots,
            },
            versions: Versions {
                oldest: versions.0,
                newest: versions.1,
            },
            credit_bytes: 1 << 22,
        }
    }

    fn hello(from: &Own, to: u8) -> Greeted {
        read(&greet(from, NodeId([to; 16]), 0, Purpose::Spans)).unwrap()
    }

    #[test]
    fn newest_common_version_counts() {
        let versions = |oldest, newest| Versions { oldest, newest };
        let mine = versions(2, 5);
        for (theirs, common) in [
            (versions(2, 5), Some(5)),
            (versions(1, 3), Some(3)),
            (versions(5, 9), Some(5)),
            (versions(1, 1), None),
            (versions(6, 9), None),
            (versions(9, 1), None),
        ] {
            assert_eq!(mine.common(theirs), common, "{theirs}");
            assert_eq!(theirs.common(mine), common, "{theirs}");
        }
        assert_eq!(mine.limited(3), versions(2, 3));
        assert_eq!(mine.limited(9), mine);
        assert_eq!(mine.limited(0), versions(2, 2));
    }

    /// Both ends of a refusal have the same reason, after it went over the wire.
    fn both_say(by: &Own, refused: &Own, expected: Option<u8>, reason: Refused) -> String {
        let wire = refusal(by, &reason);
        let expected = expected.map(|node| NodeId([node; 16]));
        let read = read_refusal(refused, expected, &wire);
        assert_eq!(read, Some(reason));
        reason.to_string()
    }

    #[test]
    fn refusals_are_the_same_at_both_ends() {
        let (one, two) = (own(1, 7, (1, 2)), own(2, 3, (3, 4)));
        let reason = judge_hello(&one, &hello(&two, 1)).unwrap_err();
        let text = both_say(&one, &two, Some(1), reason);
        assert!(text.contains("1 to 2") && text.contains("3 to 4"), "{text}");
        assert!(text.contains("upgrade the node that refuses"), "{text}");
        let reason = judge_hello(&two, &hello(&one, 2)).unwrap_err();
        let text = both_say(&two, &one, Some(2), reason);
        assert!(text.contains("upgrade the node that is refused"), "{text}");

        let two = own(2, 3, (1, 1));
        let mut foreign = two;
        foreign.identity.cluster = ClusterId([9; 16]);
        let reason = judge_hello(&one, &hello(&foreign, 1)).unwrap_err();
        assert!(matches!(reason, Refused::Cluster { .. }));
        both_say(&one, &foreign, Some(1), reason);

        let reason = judge_hello(&one, &hello(&two, 5)).unwrap_err();
        assert!(matches!(reason, Refused::Node { .. }));
        both_say(&one, &two, Some(5), reason);

        let reason = judge_hello(&one, &hello(&one, 1)).unwrap_err();
        both_say(&one, &one, None, reason);

        assert_eq!(judge_hello(&one, &hello(&two, 1)), Ok(1));
        let known = |boots, boot: u8| Known {
            node: NodeId([2; 16]),
            boot: Some((boots, BootId([boot; 16]))),
        };
        let judge = |known: Option<Known>| judge_known(&hello(&two, 1), known.as_ref());
        assert_eq!(judge(Some(known(3, 3))), Ok(()));
        assert_eq!(judge(Some(known(2, 2))), Ok(()));
        for known in [None, Some(known(4, 4)), Some(known(3, 4))] {
            both_say(&one, &two, Some(1), judge(known).unwrap_err());
        }
        let taken = judge(Some(Known {
            node: NodeId([8; 16]),
            boot: None,
        }));
        both_say(&one, &two, Some(1), taken.unwrap_err());
        for reason in [
            Refused::Stops,
            Refused::Certificate(NodeId([2; 16])),
            Refused::Many(NodeId([2; 16])),
        ] {
            both_say(&one, &two, None, reason);
        }
    }

    #[test]
    fn welcome_of_somebody_else_is_refused() {
        let (one, two) = (own(1, 7, (1, 2)), own(2, 3, (1, 2)));
        let welcome =
            |version| read(&greet(&two, one.identity.node, version, Purpose::Bulk)).unwrap();
        let known = |node: u8| Known {
            node: NodeId([node; 16]),
            boot: None,
        };
        assert_eq!(judge_welcome(&one, &known(2), &welcome(2)), Ok(Ok(2)));
        assert!(judge_welcome(&one, &known(2), &welcome(3)).is_err());
        let reason = judge_welcome(&one, &known(4), &welcome(1))
            .unwrap()
            .unwrap_err();
        // Whoever is refused has looked for nobody.
        both_say(&one, &two, None, reason);
    }

    #[test]
    fn purpose_that_is_not_known_is_the_senders_mistake() {
        let mut greeting = greet(&own(1, 1, (1, 1)), NodeId::default(), 0, Purpose::Bulk);
        greeting.purpose = 9.into();
        assert_eq!(read(&greeting), Err(Violation::Purpose(9)));
    }
}
