//! The web server of an Ironic pod: nginx with an API-like answer, images, and a port that must
//! stay unreachable from the provisioning network.

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command::wait_until;
use crate::image::Image;
use crate::namespace::Namespace;
use crate::process::Process;

/// The API: every path answers with JSON that names the instance and the client.
pub const API_PORT: u16 = 6385;
/// The image server: `/images/common.img` on every instance, `/images/<instance>/boot.iso` on that
/// one alone. `?rate=1m` paces the answer at the server, in bytes a second. The header `X-Instance` tells who answers.
pub const IMAGE_PORT: u16 = 6180;
/// JSON-RPC between conductors: never on the VIP.
pub const RPC_PORT: u16 = 6189;

/// Starts nginx for `instance`, ready to serve.
pub(crate) fn start(
    namespace: &Namespace,
    instance: &str,
    image: &Image,
    directory: &Path,
) -> Result<Process> {
    let root = directory.join("root");
    let own = root.join("images").join(instance);
    fs::create_dir_all(&own).with_context(|| format!("cannot create {}", own.display()))?;
    fs::write(own.join("boot.iso"), format!("boot image of {instance}\n"))?;
    std::os::unix::fs::symlink(&image.path, root.join("images/common.img"))?;
    let config = directory.join("nginx.conf");
    fs::write(&config, configuration(instance, directory))
        .with_context(|| format!("cannot write {}", config.display()))?;

    let error_log = directory.join("error.log");
    let mut nginx = namespace.spawn(
        "nginx",
        [
            "nginx".as_ref(),
            "-p".as_ref(),
            directory.as_os_str(),
            "-e".as_ref(),
            error_log.as_os_str(),
            "-c".as_ref(),
            config.as_os_str(),
        ],
    )?;
    let ready = wait_until(
        &format!("nginx of {instance} listens"),
        Duration::from_secs(60),
        || {
            anyhow::ensure!(nginx.running()?, "nginx ended: {}", nginx.log()?);
            namespace.enter(|| TcpStream::connect((Ipv4Addr::LOCALHOST, API_PORT)).is_ok())
        },
    );
    ready.with_context(|| fs::read_to_string(error_log).unwrap_or_default())?;
    Ok(nginx)
}

/// One process (no workers), everything below `directory`.
fn configuration(instance: &str, directory: &Path) -> String {
    let temp: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("    {kind}_temp_path {}/{kind};\n", directory.display()))
        .concat();
    format!(
        r#"daemon off;
master_process off;
user root;
pid {directory}/nginx.pid;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; multi_accept on; }}
http {{
{temp}
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 10;
    default_type application/octet-stream;
    map $arg_rate $rate {{ default $arg_rate; "" 0; }}
    server {{
        listen {API_PORT} backlog=4096;
        listen [::]:{API_PORT} backlog=4096;
        default_type application/json;
        return 200 '{{"name": "OpenStack Ironic API", "instance": "{instance}", "client": "$remote_addr", "server": "$server_addr"}}\n';
    }}
    server {{
        listen {IMAGE_PORT} backlog=4096;
        listen [::]:{IMAGE_PORT} backlog=4096;
        root {directory}/root;
        add_header X-Instance {instance};
        limit_rate $rate;
    }}
    server {{
        listen {RPC_PORT};
        listen [::]:{RPC_PORT};
        default_type application/json;
        return 200 '{{"jsonrpc": "2.0", "instance": "{instance}"}}\n';
    }}
}}
"#,
        directory = directory.display(),
    )
}
