//! What a user has to know or fix of a Service, as its Events tell it.

use std::net::IpAddr;

use lb_common::{
    MAX_BACKENDS, MAX_BACKENDS_PER_PORT, MAX_PORTS, MAX_SOURCE_RANGES, MAX_VIP_PORTS_PER_POD_PORT,
};

/// Something of a Service that is not served as it says.
///
/// Messages name what lasts (ports, nodes), not what comes and goes (pods, numbers of them): the same
/// problem is to be the same Event.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Problem {
    /// Not an address.
    #[error("`{text}` is not an IP address; ask for a VIP such as 172.22.0.2")]
    VipInvalid {
        /// What was asked for.
        text: String,
    },
    /// An address that is not the agent's to give.
    #[error(
        "{vip} is not in the agent's list of VIPs; ask for one that is, or have it added there"
    )]
    VipUnknown {
        /// What was asked for.
        vip: IpAddr,
    },
    /// Somebody else's address.
    #[error("{vip} is not for Services of namespace {namespace}; the agent's list of VIPs decides")]
    VipNotAllowed {
        /// What was asked for.
        vip: IpAddr,
        /// Who asked.
        namespace: String,
    },
    /// An address of a version of IP that the Service has no addresses of.
    #[error(
        "{vip} is not served: the Service's ipFamilies lack its version of IP; \
         have it there (`ipFamilyPolicy: RequireDualStack`), or do not ask for it"
    )]
    VipOfOtherVersion {
        /// What was asked for.
        vip: IpAddr,
    },
    /// None of those asked for can be had, so what was given before stays.
    #[error("none of the VIPs asked for can be had; {kept} stays")]
    VipKept {
        /// The VIP it has.
        kept: IpAddr,
    },
    /// Nothing left to give.
    #[error(
        "no VIP for automatic assignment is free for namespace {namespace}; \
         ask for one by annotation: Services can share one by ports"
    )]
    NoFreeVip {
        /// Who asked.
        namespace: String,
    },
    /// Ports of a VIP that an older Service has.
    #[error("{what} of {vip}: {ports} already taken by {taken_by}")]
    PortTaken {
        /// Port or group of instance ports that does not get them.
        what: String,
        /// VIP.
        vip: IpAddr,
        /// Which: `port 6385 is`, `ports 6200-6203 are`.
        ports: String,
        /// Who has them.
        taken_by: String,
    },
    /// Not TCP.
    #[error("port {port}/{protocol} is not served: only TCP is")]
    ProtocolNotServed {
        /// Port.
        port: u16,
        /// Its protocol.
        protocol: String,
    },
    /// A range that makes no sense.
    #[error(
        "loadBalancerSourceRanges: `{text}` is not a range such as 172.22.0.0/24; it admits nobody"
    )]
    BadSourceRange {
        /// The range.
        text: String,
    },
    /// A group of the annotation that makes no sense.
    #[error("instance ports `{group}`: {why}")]
    BadInstancePorts {
        /// The group.
        group: String,
        /// What is wrong with it and what to do.
        why: String,
    },
    /// Slots that cannot be read are not overwritten.
    #[error(
        "annotation ironlb.dev/instance-slots is not JSON such as {{\"ironic-0\": 0}} ({why}); \
         only pods with an index have instance ports until it is corrected or removed"
    )]
    BadSlots {
        /// What is wrong with it.
        why: String,
    },
    /// Two instances with one index.
    #[error("{identity} has no instance port: its index {slot} is already that of {taken_by}")]
    SlotTaken {
        /// Who has no slot.
        identity: String,
        /// The slot.
        slot: u32,
        /// Who has it.
        taken_by: String,
    },
    /// An index beyond the range.
    #[error("{identity} has no instance port: its index {index} is beyond the last slot {last}")]
    SlotOutOfRange {
        /// Who has no slot.
        identity: String,
        /// Its index.
        index: u32,
        /// Last slot that every group has.
        last: u32,
    },
    /// More instances than slots.
    #[error("{identity} has no instance port: all {slots} slots are taken; widen the range")]
    SlotsExhausted {
        /// The first that has none.
        identity: String,
        /// How many there are.
        slots: u32,
    },
    /// Hand-made endpoints.
    #[error(
        "endpoints without a pod are not used; \
         `kubernetes: {{endpointsWithoutPods: true}}` in the agent's configuration allows them"
    )]
    EndpointWithoutPod,
    /// Hand-made endpoints that claim to be a pod's.
    #[error(
        "endpoint {address} is not used: it names pod {pod}, which has another address or name, or is in another namespace"
    )]
    EndpointOfOtherPod {
        /// The endpoint.
        address: IpAddr,
        /// The pod's name.
        pod: String,
    },
    /// A named port that no pod has.
    #[error("port `{port}` leads nowhere: none of its pods has its targetPort")]
    NoTargetPort {
        /// The port's name.
        port: String,
    },
    /// An endpoint that would lead back to us.
    #[error("an endpoint has the address of the VIP {vip}; it is not used")]
    EndpointIsVip {
        /// The VIP.
        vip: IpAddr,
    },
    /// The node's own rules lie in wait.
    #[error(
        "its pods have hostPort {port}, which is also a port of its VIP: where the node redirects host \
         ports, it catches the VIP's traffic whenever ironlb does not; remove the hostPort"
    )]
    HostPortClash {
        /// Port.
        port: u16,
    },
    /// More endpoints on a node than a choice can be made among.
    #[error(
        "more than {MAX_BACKENDS_PER_PORT} endpoints on one node; those beyond, by name, are unused"
    )]
    EndpointsUnused,
    /// Too many VIP ports for a pod port.
    #[error(
        "port {port} of {vip} does not lead to all pods: at most {MAX_VIP_PORTS_PER_POD_PORT} VIP \
         ports may lead to one pod port"
    )]
    TooManyVipPorts {
        /// VIP.
        vip: IpAddr,
        /// Port that is short of pods.
        port: u16,
    },
    /// The data plane has no room for who may connect.
    #[error(
        "port {port} of {vip} is not served, for want of room for its loadBalancerSourceRanges: at most \
         {MAX_SOURCE_RANGES} a node, equal lists counted once"
    )]
    TooManySourceRanges {
        /// VIP.
        vip: IpAddr,
        /// Port that is not served.
        port: u16,
    },
    /// The data plane is full.
    #[error(
        "port {port} of {vip} is not served: at most {MAX_PORTS} VIP ports and {MAX_BACKENDS} \
         backends of VIP ports a node"
    )]
    TablesFull {
        /// VIP.
        vip: IpAddr,
        /// Port that is not served.
        port: u16,
    },
}

impl Problem {
    /// The Event's reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::VipInvalid { .. } | Self::VipUnknown { .. } | Self::VipOfOtherVersion { .. } => {
                "VipNotServed"
            }
            Self::VipNotAllowed { .. } => "VipNotAllowed",
            Self::VipKept { .. } => "VipKept",
            Self::NoFreeVip { .. } => "NoFreeVip",
            Self::PortTaken { .. } => "PortTaken",
            Self::ProtocolNotServed { .. } => "ProtocolNotServed",
            Self::BadSourceRange { .. } => "BadSourceRange",
            Self::BadInstancePorts { .. } => "BadInstancePorts",
            Self::BadSlots { .. } => "BadInstanceSlots",
            Self::SlotTaken { .. } => "InstanceSlotTaken",
            Self::SlotOutOfRange { .. } | Self::SlotsExhausted { .. } => "InstancePortsExhausted",
            Self::EndpointWithoutPod
            | Self::EndpointOfOtherPod { .. }
            | Self::EndpointIsVip { .. } => "EndpointNotAllowed",
            Self::NoTargetPort { .. } => "NoTargetPort",
            Self::HostPortClash { .. } => "HostPortClash",
            Self::EndpointsUnused
            | Self::TooManyVipPorts { .. }
            | Self::TooManySourceRanges { .. }
            | Self::TablesFull { .. } => "LimitReached",
        }
    }
}
