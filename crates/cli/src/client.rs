//! A client of the control API: one connection per request, so that a daemon that is restarted in
//! between is found again.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hdcs_api::ApiError;
use hdcs_server::data_dir::Layout;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::{Failure, output};

/// How long nothing is said of an answer that does not come, and how long a daemon that lives may take to say so then.
const QUIET_TIME: Duration = Duration::from_secs(3);
const PING_TIME_MAX: Duration = Duration::from_secs(2);
/// Longer than any operation of the daemon may take.
const ANSWER_TIME_MAX: Duration = Duration::from_hours(24);
/// Far more than the description of any number of volumes that a node can hold in memory.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// A command may ask for several things at once.
static HANG_SAID: AtomicBool = AtomicBool::new(false);

/// Speaks to the daemon of one data directory.
#[derive(Debug)]
pub struct Client {
    layout: Layout,
}

/// Why a request brought no answer.
#[derive(Debug)]
pub enum ClientError {
    /// No daemon has the data directory.
    NoDaemon(String),
    /// The daemon refused or failed.
    Api(ApiError),
    /// Anything else.
    Other(String),
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Api(error) => error.into(),
            ClientError::NoDaemon(message) | ClientError::Other(message) => Self::failed(message),
        }
    }
}

impl Client {
    /// A client of the daemon that has `layout`.
    pub fn new(layout: Layout) -> Self {
        Self { layout }
    }

    /// The data directory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// GET a path.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request(Method::GET, path, &()).await
    }

    /// Send a request with a body, which is empty for `()`.
    pub async fn request<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        let mut body = serde_json::to_vec(body).map_err(|error| self.unanswered(&error))?;
        if body == b"null" {
            body.clear();
        }
        let answer = self.ask(method, path, "application/json", body).await?;
        self.understood(&answer)
    }

    /// GET a path whose answer is not JSON.
    pub async fn get_bytes(&self, path: &str) -> Result<Bytes, ClientError> {
        let body = Vec::new();
        self.ask(Method::GET, path, "application/json", body).await
    }

    /// Send a request with a body that is not JSON.
    pub async fn send_bytes<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<T, ClientError> {
        let kind = "application/octet-stream";
        let answer = self.ask(method, path, kind, body).await?;
        self.understood(&answer)
    }

    fn unanswered(&self, error: &dyn std::fmt::Display) -> ClientError {
        ClientError::Other(format!(
            "the daemon did not answer: {}: {error}: see its log",
            self.layout.control_socket().display()
        ))
    }

    fn understood<T: DeserializeOwned>(&self, answer: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(answer)
            .map_err(|error| self.unanswered(&format!("its answer is not understood: {error}")))
    }

    /// Send a request; the body of the answer, if that is no error.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: Vec<u8>,
    ) -> Result<Bytes, ClientError> {
        let other = |error: &dyn std::fmt::Display| self.unanswered(error);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "hdcs")
            .header("content-type", kind)
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| other(&error))?;
        let exchange = tokio::time::timeout(ANSWER_TIME_MAX, self.exchange(request));
        let (is_success, answer) = tokio::select! {
            biased;
            ended = exchange => ended.map_err(|_| other(&"it took too long"))??,
            never = self.say_that_it_hangs() => match never {},
        };
        if is_success {
            return Ok(answer);
        }
        match serde_json::from_slice(&answer) {
            Ok(error) => Err(ClientError::Api(error)),
            Err(_) => Err(other(&String::from_utf8_lossy(&answer))),
        }
    }

    /// Say once that the daemon hangs, if it does: that it takes long to do what it was asked is no sign of that.
    async fn say_that_it_hangs(&self) -> Infallible {
        tokio::time::sleep(QUIET_TIME).await;
        let ping = Request::get("/openapi.json")
            .header("host", "hdcs")
            .body(Full::default());
        if let Ok(ping) = ping {
            let answered = tokio::time::timeout(PING_TIME_MAX, self.exchange(ping));
            if answered.await.is_err() && !HANG_SAID.swap(true, Ordering::Relaxed) {
                output::note(&format!(
                    "the daemon at {} does not answer; waiting for it (Ctrl-C ends that)",
                    self.layout.control_socket().display()
                ));
            }
        }
        pending().await
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<(bool, Bytes), ClientError> {
        let socket = self.layout.control_socket();
        let other = |error: &dyn std::fmt::Display| {
            ClientError::Other(format!(
                "cannot speak to the daemon: {}: {error}",
                socket.display()
            ))
        };
        let stream = UnixStream::connect(&socket).await.map_err(|error| {
            let absent = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
            if absent.contains(&error.kind()) {
                ClientError::NoDaemon(format!(
                    "no daemon is running: {}: start one with `hdcs serve --data {}`",
                    socket.display(),
                    self.layout.root().display()
                ))
            } else {
                other(&error)
            }
        })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| other(&error))?;
        let driver = tokio::spawn(connection);
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| other(&error))?;
        let is_success = response.status().is_success();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let answer = body.collect().await.map_err(|error| other(&error))?;
        driver.abort();
        Ok((is_success, answer.to_bytes()))
    }
}
