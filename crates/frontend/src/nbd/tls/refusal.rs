//! Why a TLS handshake failed, in words for whoever operates the node, with the names in a certificate that was refused.

use std::cell::RefCell;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use crate::access::Identity;

thread_local! {
    /// The names in the last certificate that was refused on this thread. The library tells of a certificate only once
    /// it was found good, so whoever meets the error takes them from here, right after the call that it came from.
    static REFUSED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Refuses what another verifier refuses, and remembers whom.
#[derive(Debug)]
pub struct Remembering(pub Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for Remembering {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify_client_cert(own, more, now);
        if verified.is_err() {
            let names = Identity::new(std::slice::from_ref(own), None).names();
            REFUSED.set(Some(names));
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.0.requires_raw_public_keys()
    }
}

/// What a failed handshake means. To be asked on the thread of the call that failed, right after it.
pub fn explain(error: &Error) -> String {
    let refused = REFUSED.take();
    match (error, refused) {
        (Error::InvalidCertificate(_), Some(names)) => {
            format!("{} (it says that it is of {names})", meaning(error))
        }
        _ => meaning(error),
    }
}

fn meaning(error: &Error) -> String {
    use rustls::{AlertDescription as Alert, CertificateError as Bad};
    let said = match error {
        Error::NoCertificatesPresented => "it showed no certificate",
        Error::InvalidCertificate(bad) => match bad {
            // Another authority of the same name is one whose signature is not good.
            Bad::UnknownIssuer | Bad::BadSignature => {
                "no authority in nbd_tls_client_ca_file has signed its certificate"
            }
            Bad::Revoked => "its certificate is revoked",
            Bad::UnknownRevocationStatus => {
                "no list in nbd_tls_client_crl_file is of the authority that signed its certificate"
            }
            Bad::Expired | Bad::ExpiredContext { .. } => "its certificate has expired",
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => "its certificate is not valid yet",
            Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
                "its certificate is not one of a client"
            }
            other => return format!("its certificate is not good: {other}"),
        },
        Error::AlertReceived(Alert::UnknownCA) => {
            "it does not know the authority of this node's certificate"
        }
        Error::AlertReceived(
            Alert::BadCertificate | Alert::CertificateUnknown | Alert::CertificateExpired,
        ) => {
            "it refused this node's certificate: the name by which it called the node is not in that, or its time is over"
        }
        other => return other.to_string(),
    };
    said.to_owned()
}
