//! The control plane: HTTP with JSON on `DIR/control.sock`, described by docs/openapi.json.
//!
//! Invariants:
//! 1. Nothing here is on the data path; it talks to the shard by commands alone.
//! 2. Connections, request sizes and times are bounded, so that a client can neither exhaust
//!    memory nor hold a slot for ever.
//! 3. An operation that was begun runs to its end even if its client goes away.
//!
//! Failure: every error is an [`ApiError`] with a status code that says whose fault it is.

mod audit;
mod cache_at;
mod description;
pub mod link;
pub mod node;
pub mod node_report;
pub mod serve;
pub mod view;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

pub use audit::Who;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
pub use description::openapi;
use hdcs_api::events::{Event, Outcome};
use hdcs_api::groups::{Group, GroupChange};
use hdcs_api::{
    ApiError, CheckReport, CloneVolume, CreateVolume, DeleteOptions, Deleted, DetachOptions,
    Detached, ErrorKind, EventQuery, KeyPlace, MakeSnapshot, OpenVolume, OpenedVolume, Reloaded,
    ResizeVolume, ScrubVolume, SetVolume, Snapshot, Snapshots, Status, Volume, VolumeRange,
    WarmedFrom,
};
use hdcs_core::cache::heat_map::HEAT_BYTES_MAX;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use node::Node;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use utoipa::OpenApi as _;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::events::{EVENTS_MAX, Recorder};

/// The highest number that an event may have: what all programs can read.
const EVENT_NUMBER_MAX: u64 = i64::MAX as u64;
/// Events in an answer if nobody says how many.
const EVENTS_DEFAULT: usize = 100;
/// How long whoever asks for events waits for those that are not written yet: a disk may hang.
const EVENTS_TIME_MAX: Duration = Duration::from_secs(5);
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

/// An [`ApiError`] as an answer.
struct Refusal(ApiError);

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let status = match error.kind {
            ErrorKind::Malformed => StatusCode::BAD_REQUEST,
            ErrorKind::NoMethod => StatusCode::METHOD_NOT_ALLOWED,
            ErrorKind::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut response = (status, axum::Json(&error)).into_response();
        // For the event of the request.
        response.extensions_mut().insert(error);
        response
    }
}

/// JSON whose errors are [`ApiError`]s too.
struct Json<T>(T);

impl<S: Send + Sync, T: serde::de::DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let read = Bytes::from_request(request, state);
        let invalid = |text: &str| {
            Refusal(ApiError::new(
                ErrorKind::Malformed,
                format!("request body: {text}"),
            ))
        };
        match tokio::time::timeout(HEAD_TIME_MAX, read).await {
            Ok(Ok(body)) => parsed(&body).map(Self).map_err(|why| invalid(&why)),
            Ok(Err(rejection)) => Err(invalid(&rejection.body_text())),
            Err(_) => Err(invalid("it did not come in time")),
        }
    }
}

/// What a body says. To JSON Schema `4096.0` is a whole number, as it is to JavaScript.
fn parsed<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    let error = match serde_json::from_slice(body) {
        Ok(value) => return Ok(value),
        Err(error) => error.to_string(),
    };
    let mut value: serde_json::Value = serde_json::from_slice(body).map_err(|_| error.clone())?;
    make_whole(&mut value);
    serde_json::from_value(value).map_err(|_| error)
}

/// Numbers without a fraction as whole numbers. The parser bounds how deep values lie in one another.
fn make_whole(value: &mut serde_json::Value) {
    /// Up to here every whole number is one of floating point.
    const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
    match value {
        serde_json::Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().filter(|float| float.fract() == 0.0);
            if let Some(float) = float.filter(|float| float.abs() <= WHOLE_MAX) {
                *number = (float as i64).into();
            }
        }
        serde_json::Value::Array(values) => values.iter_mut().for_each(make_whole),
        serde_json::Value::Object(fields) => fields.values_mut().for_each(make_whole),
        _ => {}
    }
}

impl<T: serde::Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

type Answer<T> = Result<Json<T>, Refusal>;

/// What stands in a query, or why it is refused.
fn in_query<T>(query: Result<Query<T>, QueryRejection>) -> Result<T, ApiError> {
    let Query(found) = query.map_err(|rejection| {
        ApiError::new(
            ErrorKind::Malformed,
            format!("query: {}", rejection.body_text()),
        )
    })?;
    Ok(found)
}

/// Run to the end whatever becomes of the client.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Answer<T> {
    match tokio::spawn(work).await {
        Ok(result) => Ok(Json(result?)),
        Err(error) => Err(ApiError::new(
            ErrorKind::Failed,
            format!("internal error: {error}: see the log of the daemon"),
        )
        .into()),
    }
}

/// The node as a whole.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn get_status(State(node): Shared) -> Answer<Status> {
    Ok(Json(node.status().await?))
}

/// Read the TLS files of `nbd_tls_*` again, without touching connections whose certificates are still good.
#[utoipa::path(post, path = "/v1/reload",
    responses((status = 200, body = Reloaded), (status = 409, body = ApiError), (status = 500, body = ApiError)))]
async fn reload(State(node): Shared) -> Answer<Reloaded> {
    detached(async move { node.reload().await }).await
}

/// Every volume, by name.
#[utoipa::path(get, path = "/v1/volumes", responses((status = 200, body = Vec<Volume>)))]
async fn list_volumes(State(node): Shared) -> Answer<Vec<Volume>> {
    Ok(Json(node.volumes().await?))
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
    Ok(Json(node.volume(&name).await?))
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
    let options = in_query(options)?;
    detached(async move { node.delete(&name, options).await }).await
}

/// Open a volume that could not be opened; with `discard_dirty` also without its write log or its local store, if that
/// is lost.
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
    Ok(Json(node.flush(&name).await?))
}

/// Return to destaging by policy.
#[utoipa::path(delete, path = "/v1/volumes/{name}/flush", params(("name" = String, Path)),
    responses((status = 200), (status = 404, body = ApiError)))]
async fn cancel_flush(State(node): Shared, Path(name): Path<String>) -> Answer<()> {
    Ok(Json(node.cancel_flush(&name).await?))
}

/// The snapshots and clones of a volume.
#[utoipa::path(get, path = "/v1/volumes/{name}/snapshots", params(("name" = String, Path)),
    responses((status = 200, body = Snapshots), (status = 400, body = ApiError),
        (status = 404, body = ApiError)))]
async fn list_snapshots(State(node): Shared, Path(name): Path<String>) -> Answer<Snapshots> {
    Ok(Json(node.snapshots(&name).await?))
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
    Ok(Json(node.cancel_copy(&name).await?))
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
    Ok(Json(node.warm_up(&name, Some(range)).await?))
}

/// Give up what is left of a warm-up.
#[utoipa::path(delete, path = "/v1/volumes/{name}/warm", params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = 404, body = ApiError)))]
async fn cancel_warm(State(node): Shared, Path(name): Path<String>) -> Answer<Volume> {
    Ok(Json(node.warm_up(&name, None).await?))
}

/// What of a volume is hot in its cache: a heat map, in the format of docs/FORMATS.md.
#[utoipa::path(get, path = "/v1/volumes/{name}/heat", params(("name" = String, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 404, body = ApiError)))]
async fn get_heat(State(node): Shared, Path(name): Path<String>) -> Result<Response, Refusal> {
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
            ErrorKind::Malformed,
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
    Ok(Json(node.check(&name).await?))
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
    Ok(Json(node.cancel_scrub(&name)?))
}

/// The groups of the cluster, by the names of their volumes. A node that is in no cluster has none to list.
#[utoipa::path(get, path = "/v1/groups",
    responses((status = 200, body = Vec<Group>),
        (status = 409, description = "This node is in no cluster.", body = ApiError)))]
async fn list_groups(State(node): Shared) -> Answer<Vec<Group>> {
    Ok(Json(node.groups.list().await?))
}

/// The group of a volume, whether this node has a part in it or not.
#[utoipa::path(get, path = "/v1/groups/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Group), (status = 404, body = ApiError),
        (status = 409, description = "This node is in no cluster.", body = ApiError)))]
async fn get_group(State(node): Shared, Path(name): Path<String>) -> Answer<Group> {
    Ok(Json(node.groups.show(&name).await?))
}

/// Change the group of a volume: how many copies there are and where, how many of them a write has, and what becomes of
/// writes for want of members. Asked at the node that serves. The nodes that come are brought up afterwards.
#[utoipa::path(patch, path = "/v1/groups/{name}", params(("name" = String, Path)),
    request_body = GroupChange,
    responses((status = 200, body = Group), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 409, body = ApiError)))]
async fn set_group(
    State(node): Shared,
    Path(name): Path<String>,
    Json(request): Json<GroupChange>,
) -> Answer<Group> {
    detached(async move { node::set_group(&node, &name, request).await }).await
}

/// Have this node, a member of the volume's group, become its primary.
#[utoipa::path(post, path = "/v1/volumes/{name}/takeover", params(("name" = String, Path)),
    responses((status = 200, body = Group), (status = 404, body = ApiError),
        (status = 409, body = ApiError)))]
async fn take_over_volume(State(node): Shared, Path(name): Path<String>) -> Answer<Group> {
    detached(async move { node.groups.take_over(&name).await }).await
}

/// What was done, refused and seen: the newest events, or those after a number, in order.
#[utoipa::path(get, path = "/v1/events", params(EventQuery),
    responses((status = 200, body = Vec<Event>)))]
async fn list_events(
    State(node): Shared,
    query: Result<Query<EventQuery>, QueryRejection>,
) -> Answer<Vec<Event>> {
    let query = in_query(query)?;
    let limit = query.limit.map_or(EVENTS_DEFAULT, usize::from);
    if !(1..=EVENTS_MAX).contains(&limit)
        || query.after.is_some_and(|after| after > EVENT_NUMBER_MAX)
    {
        return Err(ApiError::new(
            ErrorKind::Malformed,
            format!("query: limit is from 1 to {EVENTS_MAX}, after from 0 to {EVENT_NUMBER_MAX}"),
        )
        .into());
    }
    let events = node.events();
    // What the disk has not taken by then is listed later.
    let _ = events.settled(EVENTS_TIME_MAX).await;
    let volume = query.volume.as_deref();
    Ok(Json(events.list(query.after, limit, volume)))
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, body = String, content_type = "text/plain")))]
async fn get_metrics(State(node): Shared) -> Result<Response, Refusal> {
    let page = crate::metrics::render(&node.scrape().await?);
    let kind = [(header::CONTENT_TYPE, crate::metrics::CONTENT_TYPE)];
    Ok((kind, page).into_response())
}

/// This description.
#[utoipa::path(get, path = "/openapi.json",
    responses((status = 200, body = Object, content_type = "application/json")))]
async fn get_openapi() -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (kind, openapi()).into_response()
}

fn described() -> OpenApiRouter<Arc<Node>> {
    OpenApiRouter::with_openapi(description::Description::openapi())
        .routes(routes!(get_status))
        .routes(routes!(reload))
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
        .routes(routes!(list_groups))
        .routes(routes!(get_group, set_group))
        .routes(routes!(take_over_volume))
        .routes(routes!(list_events))
        .routes(routes!(get_metrics))
        .routes(routes!(get_openapi))
}

async fn not_found() -> Refusal {
    Refusal(ApiError::new(
        ErrorKind::NotFound,
        "no such path: see GET /openapi.json",
    ))
}

async fn no_method() -> Refusal {
    let why = "this path knows no such method: see GET /openapi.json";
    Refusal(ApiError::new(ErrorKind::NoMethod, why))
}

/// Every route.
pub fn router(node: Arc<Node>) -> Router {
    let (router, _description) = described().split_for_parts();
    router
        .fallback(not_found)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(axum::middleware::from_fn_with_state(
            Arc::clone(&node),
            audit::note,
        ))
        .with_state(node)
}

/// The metrics alone, for the TCP listener.
pub fn metrics_router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/metrics", axum::routing::get(get_metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(no_method)
        .with_state(node)
}

/// Serves connections of one router, so many at once.
#[derive(Clone)]
pub struct Server {
    router: Router,
    slots: Arc<Semaphore>,
    time_max: Duration,
    events: Recorder,
}

impl Server {
    /// A server of `router`, whose connections last no longer than `time_max`.
    pub fn new(router: Router, time_max: Duration, events: Recorder) -> Self {
        Self {
            router,
            slots: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            time_max,
            events,
        }
    }

    /// Wait until another connection may be accepted.
    pub async fn ready(&self) {
        // The semaphore is never closed.
        let _permit = self.slots.acquire().await;
    }

    /// Serve one connection, of `who`, in a task of its own.
    pub fn spawn<S>(&self, stream: S, who: Who)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Ok(permit) = Arc::clone(&self.slots).try_acquire_owned() else {
            return;
        };
        let router = self.router.clone().layer(axum::Extension(who.clone()));
        let events = self.events.clone();
        let service = TowerToHyperService::new(router);
        let time_max = self.time_max;
        tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME_MAX)
                .serve_connection(TokioIo::new(stream), service);
            match tokio::time::timeout(time_max, connection).await {
                Ok(Ok(())) => {}
                // What it sent is no request, or came too slowly; a client that goes away is no event.
                Ok(Err(error)) if error.is_parse() || error.is_timeout() => {
                    tracing::debug!("control connection: {error}");
                    let event = Event::new("request", Outcome::Refused, &who.0);
                    events.note(event.why(format!("it sent no HTTP request: {error}")));
                }
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
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        if std::env::var_os("HDCS_UPDATE").is_some() {
            std::fs::write(&path, openapi()).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap();
        assert!(
            found == openapi(),
            "docs/openapi.json differs from the routes: run `HDCS_UPDATE=1 cargo test -p hdcs-server`"
        );
    }
}
