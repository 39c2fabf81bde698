//! The value of a configuration key, as the API carries it.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The value of a key before it is checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Value {
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A word, path or address.
    Text(String),
    /// Several of them.
    List(Vec<String>),
}

impl Value {
    /// The value that a person typed after `key=`.
    pub fn from_typed(text: &str) -> Self {
        let number = text.parse().map(Self::Int).ok();
        let truth = || text.parse().map(Self::Bool).ok();
        number
            .or_else(truth)
            .unwrap_or_else(|| Self::Text(text.to_owned()))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(truth) => write!(f, "{truth}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "\"{text}\""),
            Self::List(items) => write!(f, "{items:?}"),
        }
    }
}
