//! The HTTP client of a store, with an end to every answer: whatever a server sends, no more of it is taken than was
//! asked for.
//!
//! Invariants:
//! 1. The part of an object that is sent in answer to a get of a range is taken up to the length of that range, and any
//!    other answer, an error's included, up to [`ANSWER_BYTES_MAX`]. What goes on ends in an error.
//! 2. Nobody makes room for a body by what the server says of its length: whoever gathers one is told of no length, and
//!    makes room for what has come.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};

/// The longest answer but for an object's data. A page of a listing is the longest that is needed: a thousand names of
/// a kilobyte at most, each described in some hundred bytes.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Makes clients that are bounded.
#[derive(Debug)]
pub struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Bounded(client)))
    }
}

#[derive(Debug)]
struct Bounded(HttpClient);

/// What a server has sent more than.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the answer is longer than {0} bytes, which is all that was asked for")]
struct TooLong(u64);

impl TooLong {
    fn error(self) -> HttpError {
        HttpError::new(HttpErrorKind::Decode, self)
    }
}

/// The length of the range that a request asks for.
fn asked(request: &HttpRequest) -> Option<u64> {
    let range = request.headers().get("range")?.to_str().ok()?;
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    last.checked_sub(first)?.checked_add(1)
}

type Answering<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Bounded {
    fn call<'a, 'async_trait>(&'a self, request: HttpRequest) -> Answering<'async_trait>
    where
        'a: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move {
            let asked = asked(&request);
            let (parts, body) = self.0.execute(request).await?.into_parts();
            let is_part = parts.status.as_u16() == 206;
            let max = asked.filter(|_| is_part).unwrap_or(ANSWER_BYTES_MAX);
            if body.size_hint().lower() > max {
                return Err(TooLong(max).error());
            }
            let body = HttpResponseBody::new(Rest {
                body,
                max,
                left: max,
            });
            Ok(HttpResponse::from_parts(parts, body))
        })
    }
}

/// What of a body may still come.
struct Rest {
    body: HttpResponseBody,
    max: u64,
    left: u64,
}

impl Body for Rest {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
            match self.left.checked_sub(bytes) {
                Some(left) => self.left = left,
                None => return Poll::Ready(Some(Err(TooLong(self.max).error()))),
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use object_store::client::HttpRequestBody;

    use super::*;

    /// Answers everything with so many pieces of a kilobyte, and with a length, said of the body.
    #[derive(Debug)]
    struct Server {
        status: u16,
        pieces: usize,
        says: u64,
    }

    struct Pieces(usize, u64);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = HttpError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
            let Some(left) = self.0.checked_sub(1) else {
                return Poll::Ready(None);
            };
            self.0 = left;
            Poll::Ready(Some(Ok(Frame::data(Bytes::from(vec![7; 1024])))))
        }

        fn size_hint(&self) -> SizeHint {
            let mut hint = SizeHint::new();
            hint.set_lower(self.1);
            hint
        }
    }

    impl HttpService for Server {
        fn call<'a, 'async_trait>(&'a self, _: HttpRequest) -> Answering<'async_trait>
        where
            'a: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(async move {
                let body = HttpResponseBody::new(Pieces(self.pieces, self.says));
                let mut answer = HttpResponse::new(body);
                *answer.status_mut() = self.status.try_into().expect("a status");
                Ok(answer)
            })
        }
    }

    /// How many bytes come of an answer.
    fn taken(server: Server, range: Option<&'static str>) -> Result<usize, String> {
        let client = Bounded(HttpClient::new(server));
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        if let Some(range) = range {
            let value = range.parse().expect("a header");
            request.headers_mut().insert("range", value);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let answer = client.call(request).await.map_err(|e| e.to_string())?;
            let body = answer.into_body();
            assert_eq!(body.size_hint().lower(), 0);
            let gathered = body.collect().await.map_err(|e| e.to_string())?;
            Ok(gathered.to_bytes().len())
        })
    }

    #[test]
    fn answer_has_no_more_bytes_than_were_asked_for() {
        let server = |status, pieces| Server {
            status,
            pieces,
            says: 0,
        };
        assert_eq!(taken(server(206, 4), Some("bytes=0-4095")), Ok(4096));
        assert_eq!(taken(server(206, 3), Some("bytes=0-4095")), Ok(3072));
        assert!(taken(server(206, 5), Some("bytes=0-4095")).is_err());
        assert!(taken(server(206, usize::MAX), Some("bytes=512-4095")).is_err());
        let most = (ANSWER_BYTES_MAX / 1024) as usize;
        for (status, range) in [
            (200, None),
            (500, Some("bytes=0-4095")),
            (206, None),
            (206, Some("bytes=9-3")),
        ] {
            assert_eq!(taken(server(status, most), range), Ok(most * 1024));
            assert!(
                taken(server(status, most + 1), range).is_err(),
                "{status} {range:?}"
            );
        }
    }

    #[test]
    fn answer_that_says_to_be_longer_is_not_begun() {
        let server = |says| Server {
            status: 206,
            pieces: 1,
            says,
        };
        assert_eq!(taken(server(4096), Some("bytes=0-4095")), Ok(1024));
        let refused = taken(server(4097), Some("bytes=0-4095"));
        assert!(refused.is_err_and(|why| why.contains("longer than 4096 bytes")));
        assert!(taken(server(u64::MAX), None).is_err());
    }
}
