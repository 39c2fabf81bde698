//! docs/openapi.json: the routes and types as `utoipa` finds them, and what holds for all of them.
//!
//! Every answer that an operation may give is named, and what a schema forbids is exactly what is refused with 400:
//! a request that has the right form and asks for something that cannot be gets 422, or 409 if only the present state of
//! the node forbids it.

use hdcs_api::ApiError;
use hdcs_core::base::limits::{OBJECT_SNAPSHOT_NAME_BYTES_MAX, VOLUME_NAME_BYTES_MAX};
use serde_json::{Map, Value, json};
use utoipa::OpenApi;

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
pub(super) struct Description;

/// Names of volumes and snapshots.
const NAME_PATTERN: &str = "^[A-Za-z0-9_][A-Za-z0-9._-]*$";
const SNAPSHOT_PATTERN: &str = "^[A-Za-z0-9._-]+$";

/// Answers that every operation may give, and those that one with a body, a query or a name in its path may.
const ALWAYS: &[(&str, &str)] = &[
    (
        "500",
        "It was tried and failed; see the message and the log of the daemon.",
    ),
    ("503", "The node is starting or stopping."),
    (
        "504",
        "It took longer than it may; the message says whether it goes on.",
    ),
];
const OF_INPUT: &[(&str, &str)] = &[
    (
        "400",
        "The request has not the form that this document gives.",
    ),
    (
        "422",
        "The form is right, but nothing can be as it says: a size, a name, a place, a setting.",
    ),
];
const OF_VOLUMES: &[(&str, &str)] = &[("404", "There is no such volume or snapshot.")];
const OF_CHANGES: &[(&str, &str)] = &[
    (
        "409",
        "What is there forbids it: a name in use, dirty data, another operation under way.",
    ),
    ("507", "There is no space or memory for it."),
];

/// The OpenAPI document, as docs/openapi.json holds it.
pub fn openapi() -> String {
    let (_, document) = super::described().split_for_parts();
    // Serialising plain data fails only for maps with keys that are not strings.
    let mut document = serde_json::to_value(document).unwrap_or_default();
    if let Some(paths) = document["paths"].as_object_mut() {
        for (path, operations) in paths {
            for (method, operation) in operations.as_object_mut().into_iter().flatten() {
                complete(path, method, operation);
            }
        }
    }
    for (schema, field, pattern, max) in [
        ("CreateVolume", "name", NAME_PATTERN, VOLUME_NAME_BYTES_MAX),
        (
            "MakeSnapshot",
            "name",
            SNAPSHOT_PATTERN,
            OBJECT_SNAPSHOT_NAME_BYTES_MAX,
        ),
        (
            "CloneVolume",
            "snapshot",
            SNAPSHOT_PATTERN,
            OBJECT_SNAPSHOT_NAME_BYTES_MAX,
        ),
    ] {
        let property = &mut document["components"]["schemas"][schema]["properties"][field];
        bound_name(property, pattern, max);
    }
    for (schema, or_null) in [("CreateVolume", false), ("SetVolume", true)] {
        let mut kinds = json!([
            {"type": ["boolean", "string"]},
            {"type": "integer", "format": "int64", "minimum": i64::MIN, "maximum": i64::MAX},
            {"type": "array", "items": {"type": "string"}}
        ]);
        if let Some(kinds) = kinds.as_array_mut().filter(|_| or_null) {
            kinds.push(json!({"type": "null"}));
        }
        let settings = &mut document["components"]["schemas"][schema]["properties"]["settings"];
        settings["additionalProperties"] = json!({"oneOf": kinds});
    }
    let mut text = serde_json::to_string_pretty(&document).unwrap_or_default();
    text.push('\n');
    text
}

fn bound_name(schema: &mut Value, pattern: &str, max: usize) {
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("pattern".to_owned(), json!(pattern));
        schema.insert("minLength".to_owned(), json!(1));
        schema.insert("maxLength".to_owned(), json!(max));
    }
}

fn complete(path: &str, method: &str, operation: &mut Value) {
    let changes = method != "get";
    let mut statuses = ALWAYS.to_vec();
    let mut takes_input = operation.get("requestBody").is_some();
    let parameters = operation
        .get_mut("parameters")
        .and_then(Value::as_array_mut);
    for parameter in parameters.into_iter().flatten() {
        takes_input = true;
        let name = parameter["name"].as_str().unwrap_or_default().to_owned();
        match &*name {
            "name" => bound_name(
                &mut parameter["schema"],
                NAME_PATTERN,
                VOLUME_NAME_BYTES_MAX,
            ),
            "snapshot" => {
                bound_name(
                    &mut parameter["schema"],
                    SNAPSHOT_PATTERN,
                    OBJECT_SNAPSHOT_NAME_BYTES_MAX,
                );
            }
            _ => {}
        }
    }
    if takes_input {
        statuses.extend(OF_INPUT);
    }
    if path.contains('{') {
        statuses.extend(OF_VOLUMES);
    }
    if changes {
        statuses.extend(OF_CHANGES);
    }
    let Some(responses) = operation["responses"].as_object_mut() else {
        return;
    };
    for response in responses.values_mut() {
        if let Some(response) = response.as_object_mut() {
            let described = response.get("description").and_then(Value::as_str);
            if described.is_none_or(str::is_empty) {
                response.insert("description".to_owned(), json!("It was done."));
            }
        }
    }
    let error = json!({"application/json": {"schema": {"$ref": "#/components/schemas/ApiError"}}});
    for (status, what) in statuses {
        let answer = json!({"description": what, "content": error});
        responses.insert(status.to_owned(), answer);
    }
    let mut sorted: Vec<_> = std::mem::take(responses).into_iter().collect();
    sorted.sort_by(|one, other| one.0.cmp(&other.0));
    *responses = sorted.into_iter().collect::<Map<_, _>>();
}
