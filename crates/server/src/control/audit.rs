//! Events of the control API: who asked for which change, and how that ended.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hdcs_api::events::{Event, Outcome};
use hdcs_api::{ApiError, ErrorKind};
use hdcs_core::cache::heat_map::HEAT_BYTES_MAX;
use serde_json::Value;
use tokio::net::UnixStream;

use super::node::Node;
use super::{BODY_BYTES_MAX, HEAD_TIME_MAX, Refusal};

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub struct Who(pub Arc<str>);

impl Who {
    /// The process at the other end of a unix socket, as the kernel knows it.
    pub fn of(stream: &UnixStream) -> Self {
        let Ok(peer) = stream.peer_cred() else {
            return Self("control socket".into());
        };
        let mut who = format!("uid {}", peer.uid());
        if let Some(pid) = peer.pid() {
            let _ = write!(who, ", pid {pid}");
            // The process may have gone, and another may have its number: a name is a help, no proof.
            if let Ok(name) = std::fs::read_to_string(format!("/proc/{pid}/comm")) {
                let _ = write!(who, " ({})", name.trim());
            }
        }
        Self(who.into())
    }
}

/// What a request asks for: the last fixed part of its path, or what its method does to a volume.
fn kind_of(method: &Method, path: &str) -> String {
    let last = path.rsplit('/').find(|part| !part.starts_with('{'));
    match (method, last) {
        (&Method::POST, Some("volumes")) => "create".to_owned(),
        (&Method::PATCH, Some("volumes")) => "set".to_owned(),
        (&Method::PATCH, Some("groups")) => "set-group".to_owned(),
        (&Method::DELETE, Some("volumes")) => "delete".to_owned(),
        (&Method::POST, Some("snapshots")) => "snapshot".to_owned(),
        (&Method::DELETE, Some("snapshots")) => "delete-snapshot".to_owned(),
        (&Method::DELETE, Some(last)) => format!("cancel-{last}"),
        (_, Some(last)) => last.to_owned(),
        (_, None) => "unknown".to_owned(),
    }
}

fn outcome_of(error: &ApiError) -> Outcome {
    match error.kind {
        ErrorKind::Malformed
        | ErrorKind::NoMethod
        | ErrorKind::Invalid
        | ErrorKind::NotFound
        | ErrorKind::Conflict
        | ErrorKind::NoSpace
        | ErrorKind::Unavailable => Outcome::Refused,
        ErrorKind::Timeout | ErrorKind::Failed => Outcome::Failed,
    }
}

/// The volume in a path, or in the body of a request that makes one.
fn volume_of(path: &str, body: &[u8]) -> Option<String> {
    let mut parts = path
        .split('/')
        .skip_while(|part| !matches!(*part, "volumes" | "groups"))
        .skip(1);
    if let Some(name) = parts.next() {
        return Some(name.to_owned());
    }
    let body: Value = serde_json::from_slice(body).ok()?;
    body.get("name")?.as_str().map(str::to_owned)
}

/// What a body says, without what it leaves to defaults.
fn said(body: &[u8]) -> String {
    let Ok(mut body) = serde_json::from_slice::<Value>(body) else {
        return String::from_utf8_lossy(body).into_owned();
    };
    if let Some(fields) = body.as_object_mut() {
        fields.retain(|_, value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Object(fields) => !fields.is_empty(),
            _ => true,
        });
        if fields.is_empty() {
            return String::new();
        }
    }
    body.to_string()
}

/// What has a heat map for its body, which is larger than what others have, and says nothing in words.
const HEAT: &str = "warm-from";

/// The body of a request, as long as it may be.
async fn whole_body(kind: &str, body: Body) -> Result<Bytes, ApiError> {
    let bytes_max = if kind == HEAT {
        HEAT_BYTES_MAX
    } else {
        BODY_BYTES_MAX
    };
    let why = match tokio::time::timeout(HEAD_TIME_MAX, to_bytes(body, bytes_max)).await {
        Ok(Ok(body)) => return Ok(body),
        Ok(Err(_)) => {
            format!("request body: it has more than {bytes_max} bytes, or did not come whole")
        }
        Err(_) => "request body: it did not come in time".to_owned(),
    };
    Err(ApiError::new(ErrorKind::Malformed, why))
}

/// Note what a signal has made the node do.
pub fn note_signal(node: &Node, kind: &str, signal: &str, result: Result<(), &ApiError>) {
    node.events().note(match result {
        Ok(()) => Event::new(kind, Outcome::Done, signal),
        Err(error) => Event::new(kind, outcome_of(error), signal).why(&error.message),
    });
}

/// Note every request that changes something, and how it ended. What a request says stands in the event; secrets are
/// never part of one, only where they are.
pub async fn note(State(node): State<Arc<Node>>, request: Request, next: Next) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return next.run(request).await;
    }
    let who = request
        .extensions()
        .get::<Who>()
        .map_or("unknown", |who| &*who.0);
    let who = who.to_owned();
    let matched = request.extensions().get::<MatchedPath>();
    let kind = matched.map_or_else(
        || "unknown".to_owned(),
        |matched| kind_of(request.method(), matched.as_str()),
    );
    let uri = request.uri().clone();
    let (head, body) = request.into_parts();
    let body = match whole_body(&kind, body).await {
        Ok(body) => body,
        Err(error) => {
            let response = Refusal(error).into_response();
            node.events()
                .note(event_of(&kind, &who, &uri, &[], &response));
            return response;
        }
    };
    let request = Request::from_parts(head, Body::from(body.clone()));
    let noted = async move {
        let response = next.run(request).await;
        node.events()
            .note(event_of(&kind, &who, &uri, &body, &response));
        response
    };
    // A client that hangs up ends neither what it asked for nor the note of it.
    match tokio::spawn(noted).await {
        Ok(response) => response,
        Err(error) => {
            let why = format!("internal error: {error}: see the log of the daemon");
            Refusal(ApiError::new(ErrorKind::Failed, why)).into_response()
        }
    }
}

/// What is noted of a request and its end.
fn event_of(kind: &str, who: &str, uri: &Uri, body: &[u8], response: &Response) -> Event {
    let what = match (uri.query(), body) {
        (Some(query), []) => query.to_owned(),
        (None, body) if kind == HEAT && !body.is_empty() => format!("{} bytes", body.len()),
        (_, body) => said(body),
    };
    let error = response.extensions().get::<ApiError>();
    let outcome = match error {
        Some(error) => outcome_of(error),
        None if response.status().is_success() => Outcome::Done,
        None => Outcome::Refused,
    };
    let mut event = Event::new(kind, outcome, who).what(what);
    if let Some(volume) = volume_of(uri.path(), body) {
        event = event.of(volume);
    }
    if let Some(error) = error {
        event = event.why(error.message.clone());
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_of_a_group_is_one_of_its_volume() {
        let kind = kind_of(&Method::PATCH, "/v1/groups/{name}");
        assert_eq!(kind, "set-group");
        assert_eq!(volume_of("/v1/groups/v", b"{}").as_deref(), Some("v"));
        // A volume may have any name.
        assert_eq!(
            volume_of("/v1/volumes/groups", b"").as_deref(),
            Some("groups")
        );
    }

    #[tokio::test]
    async fn body_may_be_as_long_as_what_it_is_for() {
        let kind = kind_of(&Method::POST, "/v1/volumes/{name}/warm-from");
        for (kind, bytes, is_taken) in [
            (&*kind, HEAT_BYTES_MAX, true),
            (&*kind, HEAT_BYTES_MAX + 1, false),
            ("create", BODY_BYTES_MAX, true),
            ("create", BODY_BYTES_MAX + 1, false),
        ] {
            let body = whole_body(kind, Body::from(vec![1; bytes])).await;
            assert_eq!(
                body.is_ok_and(|body| body.len() == bytes),
                is_taken,
                "{kind} {bytes}"
            );
        }
    }
}
