//! An address of a socket, as the kernel reads it.

use std::net::SocketAddr;

/// See the module.
#[derive(Debug)]
pub enum Address {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(address) => Self::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(address.ip().octets()),
                },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => Self::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: address.ip().octets(),
                },
                sin6_scope_id: address.scope_id(),
            }),
        }
    }
}

impl Address {
    /// Where it lies.
    pub fn pointer(&self) -> *const libc::sockaddr {
        match self {
            Self::V4(address) => (&raw const *address).cast(),
            Self::V6(address) => (&raw const *address).cast(),
        }
    }

    /// How long it is.
    pub fn bytes(&self) -> libc::socklen_t {
        let bytes = match self {
            Self::V4(_) => size_of::<libc::sockaddr_in>(),
            Self::V6(_) => size_of::<libc::sockaddr_in6>(),
        };
        bytes as libc::socklen_t
    }
}
