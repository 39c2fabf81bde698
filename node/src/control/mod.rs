//! The control plane: HTTP with JSON on `DIR/control.sock`, described by docs/openapi.json.
//!
//! Invariants:
//! 1. Nothing here is on the data path; it talks to the shard by commands alone.
//! 2. Connections, request sizes and times are bounded, so that a client can neither exhaust
//!    memory nor hold a slot for ever.
//! 3. An operation that was begun runs to its end even if its client goes away.
//!
//! Failure: every error is an [`api::ApiError`] with a status code that says whose fault it is.

pub mod api;
mod cache_at;
pub mod link;
pub mod node;
pub mod serve;
pub mod view;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hdcs_core::heat::HEAT_BYTES_MAX;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use api::{
    ApiError, CheckReport, CloneVolume, CreateVolume, DeleteOptions, Deleted, DetachOptions,
    Detached, ErrorKind, KeyPlace, MakeSnapshot, OpenVolume, OpenedVolume, ResizeVolume,
    ScrubVolume, SetVolume, Snapshot, Snapshots, Status, Volume, VolumeRange, WarmedFrom,
};
use node::Node;

/// Connections at once: an operator, a dashboard, a scraper, and room.
const CONNECTIONS_MAX: usize = 64;
/// The largest request body: a few hundred bytes are usual.
const BODY_BYTES_MAX: usize = 64 << 10;
/// How long a client may take to send a request's head, or its body.
const HEAD_TIME_MAX: Duration = Duration::from_secs(30);

/// How long a connection to the socket may last: longer than the longest operation, which copies a large
/// file for a snapshot.
pub const API_TIME_MAX: Duration = Duration::from_hours(25);

/// How long one for metrics may last.
pub const METRICS_TIME_MAX: Duration = Duration::from_mins(5);

type Shared = State<Arc<Node>>;

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match self.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, axum::Json(self)).into_response()
    }
}

/// JSON whose errors are [`ApiError`]s too.
struct Json<T>(T);

impl<S: Send + Sync, T: serde::de::DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let read = axum::Json::from_request(request, state);
        let invalid =
            |text: &str| ApiError::new(ErrorKind::Invalid, format!("request body: {text}"));
        match tokio::time::timeout(HEAD_TIME_MAX, read).await {
            Ok(Ok(axum::Json(value))) => Ok(Self(value)),
            Ok(Err(rejection)) => Err(invalid(&rejection.body_text())),
            Err(_) => Err(invalid("it did not come in time")),
        }
    }
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

type Answer<T> = Result<Json<T>, ApiError>;

/// Run to the end whatever becomes of the client.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Answer<T> {
    match tokio::spawn(work).await {
        Ok(result) => result.map(Json),
        Err(error) => Err(ApiError::new(
            ErrorKind::Failed,
            format!("internal error: {error}: see the log of the daemon"),
        )),
    }
}

/// The node as a whole.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn get_status(State(node): Shared) -> Answer<Status> {
    node.status().await.map(Json)
}

/// Every volume, by name.
#[utoipa::path(get, path = "/v1/volumes", responses((status = 200, body = Vec<Volume>)))]
async fn list_volumes(State(node): Shared) -> Answer<Vec<Volume>> {
    node.volumes().await.map(Json)
}

/// Make a volume.
#[utoipa::path(post, path = "/v1/volumes", request_body = CreateVolume,
    responses((status = 200, body = Volume), (status = 400, body = ApiError),
        (status = 409, body = ApiError), (status = 507, body = ApiError)))]
async fn create_volume(State(node): Shared, Json(request): Json<CreateVolume>) -> Answer<Volume> {
    detached(async move { node.create(request).await }).await
}

/// One volume.
#[utoipa::path(get, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = 404, body = ApiError)))]
async fn get_volume(State(node): Shared, Path(name): Path<String>) -> Answer<Volume> {
    node.volume(&name).await.map(Json)
}

/// Change settings of a volume.
#[utoipa::path(patch, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    request_body = SetVolume,
    responses((status = 200, body = Volume), (status = 400, body = ApiError)))]
async fn set_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<SetVolume>,
) -> Answer<Volume> {
    detached(async move { node.set(&name, request).await }).await
}

/// Delete a volume: its dirty data is written to the backend first.
#[utoipa::path(delete, path = "/v1/volumes/{name}",
    params(("name" = String, Path), DeleteOptions),
    responses((status = 200, body = Deleted), (status = 409, body = ApiError)))]
async fn delete_volume(
    State(node): Shared,
    Path(name): Path<String>,
    options: Result<Query<DeleteOptions>, QueryRejection>,
) -> Answer<Deleted> {
    let Query(options) = options.map_err(|rejection| {
        ApiError::new(
            ErrorKind::Invalid,
            format!("query: {}", rejection.body_text()),
        )
    })?;
    detached(async move { node.delete(&name, options).await }).await
}

/// Open a volume that could not be opened; with `discard_dirty` from its backend alone, if its write
/// log is lost.
#[utoipa::path(post, path = "/v1/volumes/{name}/open", params(("name" = String, Path)),
    request_body = OpenVolume,
    responses((status = 200, body = OpenedVolume), (status = 409, body = ApiError),
        (status = 503, body = ApiError)))]
async fn open_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<OpenVolume>,
) -> Answer<OpenedVolume> {
    detached(async move { node.open_now(&name, request).await }).await
}

/// Let the node forget a volume; its backend and write log stay as they are.
#[utoipa::path(post, path = "/v1/volumes/{name}/detach", params(("name" = String, Path)),
    request_body = DetachOptions,
    responses((status = 200, body = Detached), (status = 409, body = ApiError)))]
async fn detach_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(options): Json<DetachOptions>,
) -> Answer<Detached> {
    detached(async move { node.detach(&name, options).await }).await
}

/// Change the size of a volume.
#[utoipa::path(post, path = "/v1/volumes/{name}/resize", params(("name" = String, Path)),
    request_body = ResizeVolume,
    responses((status = 200, body = Volume), (status = 409, body = ApiError)))]
async fn resize_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<ResizeVolume>,
) -> Answer<Volume> {
    detached(async move { node.resize(&name, request).await }).await
}

/// Wrap the data key of an encrypted volume with another key; the volume serves on.
#[utoipa::path(post, path = "/v1/volumes/{name}/rotate-key", params(("name" = String, Path)),
    request_body = KeyPlace,
    responses((status = 200, body = Volume), (status = 400, body = ApiError),
        (status = 404, body = ApiError)))]
async fn rotate_key(
    State(node): Shared,
    Path(name): Path<String>,
    Json(place): Json<KeyPlace>,
) -> Answer<Volume> {
    detached(async move { node.rotate_key(&name, place).await }).await
}

/// Begin to write everything dirty to the backend; `flush_remaining_bytes` tells how far it is.
#[utoipa::path(post, path = "/v1/volumes/{name}/flush", params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = 404, body = ApiError)))]
async fn flush_volume(State(node): Shared, Path(name): Path<String>) -> Answer<Volume> {
    node.flush(&name).await.map(Json)
}

/// Return to destaging by policy.
#[utoipa::path(delete, path = "/v1/volumes/{name}/flush", params(("name" = String, Path)),
    responses((status = 200), (status = 404, body = ApiError)))]
async fn cancel_flush(State(node): Shared, Path(name): Path<String>) -> Answer<()> {
    node.cancel_flush(&name).await.map(Json)
}

/// The snapshots and clones of a volume.
#[utoipa::path(get, path = "/v1/volumes/{name}/snapshots", params(("name" = String, Path)),
    responses((status = 200, body = Snapshots), (status = 400, body = ApiError),
        (status = 404, body = ApiError)))]
async fn list_snapshots(State(node): Shared, Path(name): Path<String>) -> Answer<Snapshots> {
    node.snapshots(&name).await.map(Json)
}

/// Make a snapshot, of everything that was acknowledged before. `DELETE …/copy` gives it up as long as
/// that is being written to the backend, or copied.
#[utoipa::path(post, path = "/v1/volumes/{name}/snapshots", params(("name" = String, Path)),
    request_body = MakeSnapshot,
    responses((status = 200, body = Snapshot), (status = 400, body = ApiError),
        (status = 409, body = ApiError)))]
async fn make_snapshot(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<MakeSnapshot>,
) -> Answer<Snapshot> {
    detached(async move { node.make_snapshot(&name, request).await }).await
}

/// Forget a snapshot that no clone begins with.
#[utoipa::path(delete, path = "/v1/volumes/{name}/snapshots/{snapshot}",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses((status = 200), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
async fn delete_snapshot(
    State(node): Shared,
    Path((name, snapshot)): Path<(String, String)>,
) -> Answer<()> {
    detached(async move { node.delete_snapshot(&name, &snapshot).await }).await
}

/// Make a volume that begins as a snapshot of this one and shares its objects.
#[utoipa::path(post, path = "/v1/volumes/{name}/clone", params(("name" = String, Path)),
    request_body = CloneVolume,
    responses((status = 200, body = Volume), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 409, body = ApiError)))]
async fn clone_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<CloneVolume>,
) -> Answer<Volume> {
    detached(async move { node.clone_volume(&name, request).await }).await
}

/// Give up the snapshot or clone of a volume that is being made.
#[utoipa::path(delete, path = "/v1/volumes/{name}/copy", params(("name" = String, Path)),
    responses((status = 200), (status = 404, body = ApiError)))]
async fn cancel_copy(State(node): Shared, Path(name): Path<String>) -> Answer<()> {
    node.cancel_copy(&name).await.map(Json)
}

/// Bring a range into the read cache.
#[utoipa::path(post, path = "/v1/volumes/{name}/promote", params(("name" = String, Path)),
    request_body = VolumeRange, responses((status = 200), (status = 400, body = ApiError)))]
async fn promote_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(range): Json<VolumeRange>,
) -> Answer<()> {
    detached(async move { node.move_range(&name, range, true).await }).await
}

/// Drop the clean part of a range from the read cache.
#[utoipa::path(post, path = "/v1/volumes/{name}/evict", params(("name" = String, Path)),
    request_body = VolumeRange, responses((status = 200), (status = 400, body = ApiError)))]
async fn evict_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(range): Json<VolumeRange>,
) -> Answer<()> {
    detached(async move { node.move_range(&name, range, false).await }).await
}

/// Keep a range in the SSD tier from now on; `pinned_left_bytes` tells how far filling it is.
#[utoipa::path(post, path = "/v1/volumes/{name}/pin", params(("name" = String, Path)),
    request_body = VolumeRange,
    responses((status = 200, body = Volume), (status = 400, body = ApiError),
        (status = 409, body = ApiError)))]
async fn pin_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(range): Json<VolumeRange>,
) -> Answer<Volume> {
    detached(async move { node.pin(&name, range, true).await }).await
}

/// Bring a range into the SSD tier in the background; `warm_left_bytes` tells how far it is.
#[utoipa::path(post, path = "/v1/volumes/{name}/warm", params(("name" = String, Path)),
    request_body = VolumeRange,
    responses((status = 200, body = Volume), (status = 400, body = ApiError)))]
async fn warm_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(range): Json<VolumeRange>,
) -> Answer<Volume> {
    node.warm_up(&name, Some(range)).await.map(Json)
}

/// Give up what is left of a warm-up.
#[utoipa::path(delete, path = "/v1/volumes/{name}/warm", params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = 404, body = ApiError)))]
async fn cancel_warm(State(node): Shared, Path(name): Path<String>) -> Answer<Volume> {
    node.warm_up(&name, None).await.map(Json)
}

/// What of a volume is hot in its cache: a heat map, in the format of docs/FORMATS.md.
#[utoipa::path(get, path = "/v1/volumes/{name}/heat", params(("name" = String, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 404, body = ApiError)))]
async fn get_heat(State(node): Shared, Path(name): Path<String>) -> Result<Response, ApiError> {
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    let map = node.heat(&name).await?;
    Ok((kind, map).into_response())
}

/// Warm a volume up as a heat map says, the hottest ranges first; `warm_left_bytes` tells how far it is.
#[utoipa::path(post, path = "/v1/volumes/{name}/warm-from", params(("name" = String, Path)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = WarmedFrom), (status = 400, body = ApiError),
        (status = 409, body = ApiError)))]
async fn warm_from(
    State(node): Shared,
    Path(name): Path<String>,
    request: Request,
) -> Answer<WarmedFrom> {
    let body = axum::body::to_bytes(request.into_body(), HEAT_BYTES_MAX);
    let body = body.await.map_err(|error| {
        ApiError::new(
            ErrorKind::Invalid,
            format!("request body: {error}: a heat map has at most {HEAT_BYTES_MAX} bytes"),
        )
    })?;
    detached(async move { node.warm_from(&name, &body).await }).await
}

/// Leave a range to eviction again.
#[utoipa::path(post, path = "/v1/volumes/{name}/unpin", params(("name" = String, Path)),
    request_body = VolumeRange,
    responses((status = 200, body = Volume), (status = 400, body = ApiError)))]
async fn unpin_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(range): Json<VolumeRange>,
) -> Answer<Volume> {
    detached(async move { node.pin(&name, range, false).await }).await
}

/// Verify every checksum of a volume's write log.
#[utoipa::path(post, path = "/v1/volumes/{name}/check", params(("name" = String, Path)),
    responses((status = 200, body = CheckReport), (status = 404, body = ApiError)))]
async fn check_volume(State(node): Shared, Path(name): Path<String>) -> Answer<CheckReport> {
    node.check(&name).await.map(Json)
}

/// Begin to read and verify everything that a volume has; `scrub` of the volume tells how far it is.
#[utoipa::path(post, path = "/v1/volumes/{name}/scrub", params(("name" = String, Path)),
    request_body = ScrubVolume,
    responses((status = 200, body = Volume), (status = 404, body = ApiError),
        (status = 409, body = ApiError)))]
async fn scrub_volume(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<ScrubVolume>,
) -> Answer<Volume> {
    detached(async move { node.scrub(&name, request).await }).await
}

/// End a scrub; the next one begins again.
#[utoipa::path(delete, path = "/v1/volumes/{name}/scrub", params(("name" = String, Path)),
    responses((status = 200), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
async fn cancel_scrub(State(node): Shared, Path(name): Path<String>) -> Answer<()> {
    node.cancel_scrub(&name).map(Json)
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, body = String, content_type = "text/plain")))]
async fn get_metrics(State(node): Shared) -> Result<Response, ApiError> {
    let (status, volumes) = (node.status().await?, node.volumes().await?);
    let page = crate::metrics::render(&status, &volumes);
    let kind = [(header::CONTENT_TYPE, crate::metrics::CONTENT_TYPE)];
    Ok((kind, page).into_response())
}

/// This description.
#[utoipa::path(get, path = "/openapi.json",
    responses((status = 200, body = String, content_type = "application/json")))]
async fn get_openapi() -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (kind, openapi()).into_response()
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "HDCS control API",
        description = "What `hdcs` speaks on DIR/control.sock. Errors have a kind for programs and a \
                       message for people.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(ApiError))
)]
struct Description;

fn described() -> OpenApiRouter<Arc<Node>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(get_status))
        .routes(routes!(list_volumes, create_volume))
        .routes(routes!(get_volume, set_volume, delete_volume))
        .routes(routes!(open_volume))
        .routes(routes!(detach_volume))
        .routes(routes!(resize_volume))
        .routes(routes!(rotate_key))
        .routes(routes!(flush_volume, cancel_flush))
        .routes(routes!(list_snapshots, make_snapshot))
        .routes(routes!(delete_snapshot))
        .routes(routes!(clone_volume))
        .routes(routes!(cancel_copy))
        .routes(routes!(promote_volume))
        .routes(routes!(evict_volume))
        .routes(routes!(pin_volume))
        .routes(routes!(unpin_volume))
        .routes(routes!(warm_volume, cancel_warm))
        .routes(routes!(get_heat))
        .routes(routes!(warm_from))
        .routes(routes!(check_volume))
        .routes(routes!(scrub_volume, cancel_scrub))
        .routes(routes!(get_metrics))
        .routes(routes!(get_openapi))
}

/// The OpenAPI document, as docs/openapi.json holds it.
pub fn openapi() -> String {
    let document = described().into_openapi();
    // Serialising plain data to a string fails only for maps with keys that are not strings.
    let mut text = serde_json::to_string_pretty(&document).unwrap_or_default();
    text.push('\n');
    text
}

async fn not_found() -> ApiError {
    ApiError::new(
        ErrorKind::NotFound,
        "no such path or method: see GET /openapi.json",
    )
}

/// Every route.
pub fn router(node: Arc<Node>) -> Router {
    let (router, _description) = described().split_for_parts();
    router
        .fallback(not_found)
        .method_not_allowed_fallback(not_found)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(node)
}

/// The metrics alone, for the TCP listener.
pub fn metrics_router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/metrics", axum::routing::get(get_metrics))
        .fallback(not_found)
        .with_state(node)
}

/// Serves connections of one router, so many at once.
#[derive(Clone)]
pub struct Server {
    router: Router,
    slots: Arc<Semaphore>,
    time_max: Duration,
}

impl Server {
    /// A server of `router`, whose connections last no longer than `time_max`.
    pub fn new(router: Router, time_max: Duration) -> Self {
        Self {
            router,
            slots: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            time_max,
        }
    }

    /// Wait until another connection may be accepted.
    pub async fn ready(&self) {
        // The semaphore is never closed.
        let _permit = self.slots.acquire().await;
    }

    /// Serve one connection in a task of its own.
    pub fn spawn<S>(&self, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Ok(permit) = Arc::clone(&self.slots).try_acquire_owned() else {
            return;
        };
        let service = TowerToHyperService::new(self.router.clone());
        let time_max = self.time_max;
        tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME_MAX)
                .serve_connection(TokioIo::new(stream), service);
            match tokio::time::timeout(time_max, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!("control connection: {error}"),
                Err(_) => tracing::debug!("control connection: open for too long"),
            }
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `HDCS_UPDATE=1 cargo test` writes docs/openapi.json.
    #[test]
    fn openapi_has_not_drifted() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
        if std::env::var_os("HDCS_UPDATE").is_some() {
            std::fs::write(&path, openapi()).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap();
        assert!(
            found == openapi(),
            "docs/openapi.json differs from the routes: run `HDCS_UPDATE=1 cargo test -p hdcs-node`"
        );
    }
}
