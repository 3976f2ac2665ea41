//! The agent's port: metrics, health, readiness, the log's level, and what a pod may know of itself.
//!
//! | path | for |
//! |---|---|
//! | `GET /metrics` | Prometheus |
//! | `GET /healthz` | liveness: the process lives and its loop comes round |
//! | `GET /readyz` | readiness: programs attached, maps in step with the source; the body says what is missing |
//! | `GET`, `PUT /v1/log-level` | the log's filter; from this node's loopback only |
//! | `GET /v1/instances/self` | a pod on this node: the VIPs and ports that lead to it |
//!
//! What answers here is never in the packets' way, and its failure never ends the agent.

pub mod client;
mod guard;
pub mod instances;
mod metrics;
mod room;
mod transmit;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::dataplane::read::Reader;
use crate::interfaces;
use crate::memory;
use crate::observed::{Observed, Readiness};
use guard::Guard;
use room::{Place, Room};

/// The port that nobody else should have.
pub const PORT: u16 = 9469;
/// Path at which a pod asks for itself.
pub const SELF_PATH: &str = "/v1/instances/self";
/// Path of the log's filter.
pub const LOG_LEVEL_PATH: &str = "/v1/log-level";

/// How long a client may take to ask.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection may last; Prometheus and kubelet make new ones.
const LIFETIME: Duration = Duration::from_secs(300);
/// How soon to try again to listen.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// A text of so many bytes has taken memory worth giving back.
const LARGE_SCRAPE: usize = 1 << 20;
/// Bytes of a filter at most.
const FILTER_LENGTH: usize = 4096;

/// Where to listen, and for whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address and port; `None` for all addresses of both families, [`PORT`].
    pub listen: Option<SocketAddr>,
    /// The node's internal addresses.
    pub node_addresses: Vec<IpAddr>,
    /// Root of the pins.
    pub bpffs: PathBuf,
}

/// The log's filter, as something that can be read and changed while the agent runs.
pub trait LogFilter: Send + Sync {
    /// The filter in force.
    fn get(&self) -> String;
    /// Sets another one.
    ///
    /// # Errors
    /// What is wrong with it; the former one stays.
    fn set(&self, filter: &str) -> Result<(), String>;
}

/// Serves for ever. Cannot listen? Then it says so and tries again.
pub async fn serve(options: Options, observed: Arc<Observed>, log: Arc<dyn LogFilter>) {
    let listener = loop {
        match listen(options.listen) {
            Ok(listener) => break listener,
            Err(error) => {
                let wanted = options.listen;
                let wanted = wanted.map_or_else(|| format!("port {PORT}"), |w| w.to_string());
                warn!(
                    "cannot listen on {wanted} for metrics and probes: {error}; trying again every {LISTEN_AGAIN:?}. \
                     Another agent on this node? Then give this one another --listen"
                );
                sleep(LISTEN_AGAIN).await;
            }
        }
    };
    if let Ok(address) = listener.local_addr() {
        info!("metrics and probes at http://{address}");
    }
    tokio::spawn(transmit::watch(Arc::clone(&observed)));
    let server = Arc::new(Server {
        guard: Mutex::new(Guard::new(options.node_addresses)),
        scraping: Semaphore::new(1),
        bpffs: options.bpffs,
        observed,
        log,
    });
    let room = Arc::new(Room::default());
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let server = Arc::clone(&server);
                match server.place(&room, peer) {
                    Ok(place) => drop(tokio::spawn(async move {
                        server.connection(stream, peer).await;
                        drop(place);
                    })),
                    Err(why) => {
                        debug!("a connection from {peer} is refused: {why:#}");
                        reset(&stream);
                    }
                }
            }
            Err(error) => {
                // Too many open files, or a client that left at once.
                debug!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn listen(wanted: Option<SocketAddr>) -> io::Result<TcpListener> {
    match wanted {
        Some(address) => bind(address),
        None => bind((Ipv6Addr::UNSPECIFIED, PORT).into()).or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Err(error),
            // No IPv6 on this node.
            _ => bind((Ipv4Addr::UNSPECIFIED, PORT).into()),
        }),
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(128)?;
    TcpListener::from_std(socket.into())
}

struct Server {
    guard: Mutex<Guard>,
    /// One scrape at a time: it is some thousand system calls.
    scraping: Semaphore,
    bpffs: PathBuf,
    observed: Arc<Observed>,
    log: Arc<dyn LogFilter>,
}

type Answer = Response<Full<Bytes>>;

/// Lets a connection end with a RST, as from a port that nobody listens on.
fn reset(stream: &TcpStream) {
    if let Err(error) = SockRef::from(stream).set_linger(Some(Duration::ZERO)) {
        debug!(%error, "cannot reset a connection");
    }
}

impl Server {
    fn place(&self, room: &Arc<Room>, peer: SocketAddr) -> anyhow::Result<Place> {
        let peer = peer.ip().to_canonical();
        let is_own = self.guard().is_own(&self.observed.uplinks(), peer)?;
        room.take(peer, is_own)
            .context("there are too many already")
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        match self.admits(&stream, peer) {
            Ok(true) => {}
            refused => {
                if let Err(error) = refused {
                    debug!("a connection from {peer} cannot be judged: {error}");
                }
                reset(&stream);
                return;
            }
        }
        let peer = peer.ip().to_canonical();
        let service = service_fn(|request| {
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.answer(peer, request).await) }
        });
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(PATIENCE)
            .serve_connection(TokioIo::new(stream), service);
        if let Ok(Err(error)) = timeout(LIFETIME, served).await {
            debug!("a connection from {peer} failed: {error}");
        }
    }

    fn admits(&self, stream: &TcpStream, peer: SocketAddr) -> anyhow::Result<bool> {
        let uplinks = self.observed.uplinks();
        Ok(self.guard().admits(&uplinks, stream.local_addr()?, peer)?)
    }

    async fn answer(&self, peer: IpAddr, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_owned();
        let get = matches!(*request.method(), Method::GET | Method::HEAD);
        match path.as_str() {
            "/metrics" if get => self.metrics().await,
            "/healthz" if get => match self.observed.hangs() {
                None => text(StatusCode::OK, "ok\n"),
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            },
            "/readyz" if get => ready(&self.observed.readiness()),
            LOG_LEVEL_PATH if get || request.method() == Method::PUT => {
                self.log_level(peer, request).await
            }
            "/metrics" | "/healthz" | "/readyz" => wrong_method("GET"),
            LOG_LEVEL_PATH => wrong_method("GET, PUT"),
            _ => match path.strip_prefix("/v1/instances/") {
                Some(who) if get => self.instance(peer, who),
                Some(_) => wrong_method("GET"),
                None => text(StatusCode::NOT_FOUND, "there is nothing here\n"),
            },
        }
    }

    async fn metrics(&self) -> Answer {
        let Ok(_turn) = self.scraping.acquire().await else {
            return text(StatusCode::INTERNAL_SERVER_ERROR, "shutting down\n");
        };
        let bpffs = self.bpffs.clone();
        let observed = Arc::clone(&self.observed);
        let rendered = tokio::task::spawn_blocking(move || {
            let views = metrics::Views::read(&Reader::open(&bpffs)?)?;
            let body = metrics::render(views, observed.snapshot(), &observed.measured)?;
            if body.len() > LARGE_SCRAPE {
                memory::give_back();
            }
            anyhow::Ok(body)
        });
        match rendered.await.map_err(Into::into).flatten() {
            Ok(body) => with_type(StatusCode::OK, metrics::CONTENT_TYPE, body),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }

    async fn log_level(&self, peer: IpAddr, request: Request<Incoming>) -> Answer {
        if !peer.is_loopback() {
            return text(
                StatusCode::FORBIDDEN,
                "the log's level is for this node's loopback only: `kubectl exec` into the agent's pod and run `ironlb log-level`\n",
            );
        }
        if request.method() == Method::PUT {
            let body = Limited::new(request.into_body(), FILTER_LENGTH).collect();
            let Ok(Ok(body)) = timeout(PATIENCE, body).await else {
                return text(
                    StatusCode::BAD_REQUEST,
                    "the filter did not arrive, or is too long\n",
                );
            };
            let body = body.to_bytes();
            let filter = String::from_utf8_lossy(&body);
            let filter = filter.trim();
            match self.log.set(filter) {
                Ok(()) => info!("the log's filter is `{filter}` now"),
                Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
            }
        }
        text(StatusCode::OK, format!("{}\n", self.log.get()))
    }

    fn instance(&self, peer: IpAddr, who: &str) -> Answer {
        if who != "self" && who.parse() != Ok(peer) {
            return text(
                StatusCode::FORBIDDEN,
                format!("you are {peer}, and may ask for yourself only\n"),
            );
        }
        if let Some(why) = self.not_ours(peer) {
            return text(StatusCode::FORBIDDEN, format!("{why}\n"));
        }
        match instances::answer(&self.observed.tables(), peer) {
            Some(answer) => match serde_json::to_string(&answer) {
                Ok(body) => with_type(StatusCode::OK, "application/json", body + "\n"),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            },
            None => text(
                StatusCode::NOT_FOUND,
                format!(
                    "not yet: no VIP port leads to {peer}; is it listed in an EndpointSlice of a Service that is served on this node?\n"
                ),
            ),
        }
    }

    /// Why an address is not that of a pod on this node. A pod's address is reached by a device of its
    /// own or the CNI's, never by an uplink or the way out.
    fn not_ours(&self, peer: IpAddr) -> Option<String> {
        let judged = || {
            let host = interfaces::Host::read()?;
            let own = host.owner(peer).is_some() || peer.is_loopback();
            let device = interfaces::route_to(peer)?;
            let mut outside = host.default_routes.clone();
            for uplink in self.observed.uplinks() {
                let places = host.resolve(&uplink.selector)?;
                outside.extend(places.iter().flat_map(|place| [place.port, place.device]));
            }
            // A pod on the host network has the node's own address.
            Ok::<_, interfaces::InterfaceError>(
                own || device.is_some_and(|d| !outside.contains(&d)),
            )
        };
        match judged() {
            Ok(true) => None,
            Ok(false) => Some(format!("{peer} is not the address of a pod on this node")),
            Err(error) => Some(format!(
                "cannot tell whether {peer} is a pod on this node: {error}"
            )),
        }
    }
}

fn ready(readiness: &Readiness) -> Answer {
    let Readiness { missing, notes } = readiness;
    let (status, first) = match missing.is_empty() {
        true => (StatusCode::OK, "ready"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready"),
    };
    let mut body = format!("{first}\n");
    for line in missing {
        body += &format!("missing: {line}\n");
    }
    for line in notes {
        body += &format!("note: {line}\n");
    }
    text(status, body)
}

fn text(status: StatusCode, body: impl Into<String>) -> Answer {
    with_type(status, "text/plain; charset=utf-8", body.into())
}

fn wrong_method(allowed: &'static str) -> Answer {
    let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, format!("{allowed} only\n"));
    answer
        .headers_mut()
        .insert(ALLOW, HeaderValue::from_static(allowed));
    answer
}

fn with_type(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
