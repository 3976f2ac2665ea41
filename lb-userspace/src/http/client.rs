//! One question to an agent's port, for the commands that ask one.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer at most.
const ANSWER_LENGTH: usize = 1 << 20;

/// Asks the agent at `address`; returns status and body.
///
/// # Errors
/// When nobody answers, or not as HTTP; the message names the address.
pub async fn ask(
    address: SocketAddr,
    method: Method,
    path: &str,
    body: String,
) -> anyhow::Result<(StatusCode, String)> {
    timeout(PATIENCE, exchange(address, method, path, body))
        .await
        .map_err(|_| anyhow!("no answer within {PATIENCE:?}"))
        .flatten()
        .with_context(|| format!("cannot ask the agent at {address}"))
}

async fn exchange(
    address: SocketAddr,
    method: Method,
    path: &str,
    body: String,
) -> anyhow::Result<(StatusCode, String)> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, address.to_string())
        .body(Full::new(Bytes::from(body)))?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_LENGTH)
        .collect()
        .await;
    connection.abort();
    let body = body.map_err(|error| anyhow!("{error}"))?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}
