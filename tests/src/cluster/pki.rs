//! The cluster's certificates and kubeconfigs: one authority for everything, as in a small kubeadm cluster.

use std::net::IpAddr;

use anyhow::Result;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::json;

/// A certificate authority.
pub(crate) struct Pki {
    authority: Issuer<'static, KeyPair>,
    /// Its own certificate, PEM.
    pub(crate) certificate: String,
}

/// Somebody whom the authority vouches for, as a client and as a server.
pub(crate) struct Identity {
    /// PEM.
    pub(crate) certificate: String,
    /// PEM.
    pub(crate) key: String,
}

impl Pki {
    /// Makes the authority.
    ///
    /// # Errors
    /// When there is no randomness.
    pub(crate) fn create() -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let name = &mut parameters.distinguished_name;
        name.push(DnType::CommonName, "ironlb test cluster");
        let certificate = parameters.self_signed(&key)?.pem();
        Ok(Self {
            authority: Issuer::new(parameters, key),
            certificate,
        })
    }

    /// Makes the identity of user `name` in `group`, who may be a server at `names` and `addresses`, too.
    ///
    /// # Errors
    /// When a name is none of the DNS.
    pub(crate) fn identity(
        &self,
        name: &str,
        group: &str,
        names: &[&str],
        addresses: &[IpAddr],
    ) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::default();
        let subject = &mut parameters.distinguished_name;
        subject.push(DnType::OrganizationName, group);
        subject.push(DnType::CommonName, name);
        for name in names {
            let name = SanType::DnsName((*name).try_into()?);
            parameters.subject_alt_names.push(name);
        }
        let addresses = addresses.iter().copied().map(SanType::IpAddress);
        parameters.subject_alt_names.extend(addresses);
        parameters.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ClientAuth,
            ExtendedKeyUsagePurpose::ServerAuth,
        ];
        let certificate = parameters.signed_by(&key, &self.authority)?;
        Ok(Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    /// A kubeconfig with which `identity` talks to `server`; it needs no other file.
    pub(crate) fn kubeconfig(&self, identity: &Identity, server: &str) -> String {
        let encode = |text: &str| BASE64_STANDARD.encode(text);
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "ironlb", "cluster": {
                "server": server,
                "certificate-authority-data": encode(&self.certificate),
            }}],
            "users": [{"name": "ironlb", "user": {
                "client-certificate-data": encode(&identity.certificate),
                "client-key-data": encode(&identity.key),
            }}],
            "contexts": [{"name": "ironlb", "context": {"cluster": "ironlb", "user": "ironlb"}}],
            "current-context": "ironlb",
        });
        format!("{config:#}\n")
    }
}

/// The private and the public key (PEM) of ServiceAccount tokens.
///
/// # Errors
/// When there is no randomness.
pub(crate) fn token_keys() -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}
