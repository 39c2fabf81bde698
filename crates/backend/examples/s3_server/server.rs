//! An S3 server over a directory: s3s-fs, whose conditional puts are made atomic.
//!
//! s3s-fs looks whether an object is there, and then writes it; a lock over all conditional puts
//! makes that one step, as S3 promises. It syncs nothing: it is for tests.

use std::path::Path;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::IF_NONE_MATCH;
use hyper::service::service_fn;
use hyper::{Request, server};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tokio::sync::Mutex;

/// Serve the directories of `root` as buckets until something fails.
pub async fn serve(
    root: &Path,
    listener: std::net::TcpListener,
    key: &str,
    secret: &str,
) -> std::io::Result<()> {
    let files =
        FileSystem::new(root).map_err(|error| std::io::Error::other(format!("{error:?}")))?;
    let mut builder = S3ServiceBuilder::new(files);
    builder.set_auth(SimpleAuth::from_single(key, secret));
    let service = builder.build();
    let conditional = Arc::new(Mutex::new(()));
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let (socket, _) = listener.accept().await?;
        let (service, conditional) = (service.clone(), Arc::clone(&conditional));
        let answer = service_fn(move |request: Request<Incoming>| {
            let (service, conditional) = (service.clone(), Arc::clone(&conditional));
            async move {
                let _alone = if request.headers().contains_key(IF_NONE_MATCH) {
                    Some(conditional.lock().await)
                } else {
                    None
                };
                service.call(request.map(s3s::Body::from)).await
            }
        });
        tokio::spawn(async move {
            let connection = server::conn::http1::Builder::new();
            // A client that goes away is no concern of the server's.
            let _ = connection
                .serve_connection(TokioIo::new(socket), answer)
                .await;
        });
    }
}
