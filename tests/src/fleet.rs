//! A laboratory with an agent on every node, what can happen to them, and who announces the VIP.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use ironlb::dataplane::read::Reader;
use rustix::process::Signal;
use serde_json::Value;

use crate::agent::{Agent, ironlb};
use crate::arp;
use crate::command::wait_until;
use crate::laboratory::{Laboratory, Node, VIP};

/// The agents of all nodes. They go before the laboratory.
#[derive(Debug)]
pub struct Fleet {
    /// By number of the node; none where it was stopped or killed.
    agents: Vec<Option<Agent>>,
    macs: Vec<[u8; 6]>,
    /// The laboratory.
    pub lab: Laboratory,
}

impl Fleet {
    /// Starts the agents all at once, waits until one announces the VIP and each has met the others and uses all pods.
    ///
    /// # Errors
    /// When one does not start, or not one node announces the VIP.
    pub fn start(lab: Laboratory, config: &Value) -> Result<Self> {
        let mut fleet = Self::prepare(lab, config)?;
        fleet.launch_all()?;
        fleet.wait_for_holder(Self::PATIENCE)?;
        let others = fleet.lab.nodes.len() - 1;
        for node in &fleet.lab.nodes {
            let what = format!("{} uses the pods of all nodes", node.name);
            wait_until(&what, Self::PATIENCE, || {
                let reader = Reader::open(&node.bpffs)?;
                let peers = reader.peers()?;
                let are_met = peers
                    .iter()
                    .all(|peer| peer.live && peer.reflecting && peer.synced);
                Ok(peers.len() == others
                    && are_met
                    && reader.backends()?.iter().all(|backend| backend.eligible))
            })?;
        }
        Ok(fleet)
    }

    /// How long the first election may take.
    pub const PATIENCE: Duration = Duration::from_secs(20);

    /// Writes the configurations of all agents and starts none.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn prepare(lab: Laboratory, config: &Value) -> Result<Self> {
        let fleet = Self {
            agents: lab.nodes.iter().map(|_| None).collect(),
            macs: lab.nodes.iter().map(Node::mac).collect::<Result<_>>()?,
            lab,
        };
        fleet.reconfigure(config)?;
        Ok(fleet)
    }

    /// Starts the agents all at once and waits until each has brought its maps in step.
    ///
    /// # Errors
    /// When one does not start.
    pub fn launch_all(&mut self) -> Result<()> {
        for (agent, node) in self.agents.iter_mut().zip(&self.lab.nodes) {
            *agent = Some(Agent::spawn(node)?);
        }
        for (agent, node) in self.agents.iter_mut().zip(&self.lab.nodes) {
            agent
                .as_mut()
                .context("not started")?
                .wait_until_ready(node)?;
        }
        Ok(())
    }

    /// Rewrites the configurations of all agents, one after the other.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn reconfigure(&self, config: &Value) -> Result<()> {
        self.lab
            .nodes
            .iter()
            .try_for_each(|node| node.write_config(config))
    }

    /// MAC of a node's provisioning port.
    pub fn mac(&self, node: usize) -> [u8; 6] {
        self.macs[node]
    }

    /// Numbers of the nodes that answer one ARP question for the VIP.
    ///
    /// # Errors
    /// When it cannot be asked, or somebody else answers.
    pub fn answering(&self) -> Result<BTreeSet<usize>> {
        let limit = Duration::from_millis(100);
        // The last host: it has the least other traffic.
        let host = self.lab.hosts.last().context("no host to ask from")?;
        arp::ask(host, VIP, limit)?
            .iter()
            .map(|answer| {
                let node = self.macs.iter().position(|mac| *mac == answer.mac);
                node.with_context(|| format!("{:x?} is no node's MAC", answer.mac))
            })
            .collect()
    }

    /// Waits until exactly one node answers for the VIP; its number.
    ///
    /// # Errors
    /// When it is not so within `limit`.
    pub fn wait_for_holder(&self, limit: Duration) -> Result<usize> {
        self.wait_for_holder_but(None, limit)
    }

    /// As [`Fleet::wait_for_holder`], when it must be another than `former`.
    ///
    /// # Errors
    /// When it is not so within `limit`.
    pub fn wait_for_successor(&self, former: usize, limit: Duration) -> Result<usize> {
        self.wait_for_holder_but(Some(former), limit)
    }

    fn wait_for_holder_but(&self, former: Option<usize>, limit: Duration) -> Result<usize> {
        let mut answering = BTreeSet::new();
        let found = wait_until("one node announces the VIP", limit, || {
            answering = self.answering()?;
            Ok(answering.len() == 1 && answering.first() != former.as_ref())
        });
        found.with_context(|| format!("nodes that answered the last time: {answering:?}"))?;
        answering.pop_first().context("nobody answers")
    }

    /// The agent of a node.
    ///
    /// # Errors
    /// When it was stopped or killed.
    pub fn agent(&mut self, node: usize) -> Result<&mut Agent> {
        self.agents[node]
            .as_mut()
            .with_context(|| format!("no agent runs on node{node}"))
    }

    /// Stops a node's agent as a planned end does (SIGTERM), and waits for that.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(&mut self, node: usize) -> Result<()> {
        self.agent(node)?.stop()?;
        self.agents[node] = None;
        Ok(())
    }

    /// Kills a node's agent (SIGKILL).
    ///
    /// # Errors
    /// When there is none.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        self.agent(node)?.process.kill()?;
        self.agents[node] = None;
        Ok(())
    }

    /// Makes a node's agent hang (SIGSTOP).
    ///
    /// # Errors
    /// When there is none.
    pub fn hang(&mut self, node: usize) -> Result<()> {
        self.agent(node)?.process.signal(Signal::STOP)
    }

    /// Lets an agent that hangs go on (SIGCONT).
    ///
    /// # Errors
    /// When there is none.
    pub fn resume(&mut self, node: usize) -> Result<()> {
        self.agent(node)?.process.signal(Signal::CONT)
    }

    /// Starts a node's agent with the configuration that it has, and waits until its maps are in step.
    ///
    /// # Errors
    /// When it does not start.
    pub fn launch(&mut self, node: usize) -> Result<()> {
        self.agents[node] = Some(Agent::launch(&self.lab.nodes[node])?);
        Ok(())
    }

    /// Stops a node's agent and starts another binary in its place.
    ///
    /// # Errors
    /// When one does not end or the other does not start.
    pub fn upgrade(&mut self, node: usize) -> Result<()> {
        let place = &self.lab.nodes[node];
        let binary = self.lab.directory().join(format!("{}-ironlb", place.name));
        // Not over the one that may run from there.
        let fresh = binary.with_extension("new");
        fs::copy(ironlb()?, &fresh)
            .and_then(|_| fs::rename(&fresh, &binary))
            .with_context(|| format!("cannot copy ironlb to {}", binary.display()))?;
        self.stop(node)?;
        let place = &self.lab.nodes[node];
        let mut agent = Agent::spawn_binary(place, &binary)?;
        agent.wait_until_ready(place)?;
        self.agents[node] = Some(agent);
        Ok(())
    }

    /// Takes a whole node away: its cable, its agent and its pods.
    ///
    /// # Errors
    /// When something of it was not there.
    pub fn kill_node(&mut self, node: usize) -> Result<()> {
        let place = &mut self.lab.nodes[node];
        self.lab
            .switch
            .ip(&format!("link set {} down", place.name))?;
        for pod in &mut place.pods {
            pod.web.kill()?;
        }
        self.kill(node)
    }
}
