#!/bin/sh
# Make a certificate authority, and certificates signed by it. For tests only: the keys have no
# passphrase and are valid for two days.
#   tls.sh DIR                                 DIR gets ca-cert.pem, server-cert.pem, server-key.pem, client-cert.pem
#                                              and client-key.pem, the names that libnbd and QEMU look for. The
#                                              server's certificate is for localhost, 127.0.0.1 and ::1; the client's
#                                              has no name
#   tls.sh DIR client NAME ALTNAMES [expired]  DIR/NAME gets ca-cert.pem, client-cert.pem and client-key.pem of a client
#                                              with these alternative names, such as DNS:a.example,URI:spiffe://x/a
#   tls.sh DIR node NAME ALTNAMES [expired]    DIR/NAME gets node-cert.pem and node-key.pem of a node, good for servers and
#                                              clients
#   tls.sh DIR revoke NAME...                  DIR gets crl.pem: these clients, and all revoked before, are revoked
#   tls.sh DIR revoke-node NAME...             the same of nodes
set -eu
[ $# -ge 1 ] || { echo "usage: $0 DIR [client|node NAME ALTNAMES [expired] | revoke|revoke-node NAME...]" >&2; exit 2; }
mkdir -p "$1"
cd "$1"
shift
umask 077

key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1.sec1"
    openssl pkcs8 -topk8 -nocrypt -in "$1.sec1" -out "$1"
    rm "$1.sec1"
}

# certificate PREFIX SUBJECT EXTENSIONS [OPTIONS]: PREFIX-cert.pem and PREFIX-key.pem, signed by the authority
certificate() {
    prefix=$1 subject=$2 extensions=$3
    shift 3
    key "$prefix-key.pem"
    printf '%s\n' "$extensions" > "$prefix.ext"
    openssl req -new -key "$prefix-key.pem" -subj "/CN=$subject" -out "$prefix.csr"
    openssl ca -batch -notext -config ca.cnf -in "$prefix.csr" -extfile "$prefix.ext" -out "$prefix-cert.pem" "$@" \
        2>/dev/null
    rm "$prefix.csr" "$prefix.ext"
}

authority() {
    key ca-key.pem
    openssl req -x509 -new -key ca-key.pem -sha256 -days 2 -subj "/CN=hdcs test authority" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -out ca-cert.pem
    : > index.txt
    cat > ca.cnf <<CONFIG
[ca]
default_ca = test
[test]
database = index.txt
new_certs_dir = .
rand_serial = yes
certificate = ca-cert.pem
private_key = ca-key.pem
default_md = sha256
default_days = 2
default_crl_days = 2
unique_subject = no
policy = any
crl_extensions = crl
[any]
commonName = supplied
[crl]
authorityKeyIdentifier = keyid:always
CONFIG
}

# revoke KIND NAME...
revoke() {
    kind=$1
    shift
    for name; do
        openssl ca -config ca.cnf -revoke "$name/$kind-cert.pem" 2>/dev/null
    done
    # In its place at once: a node may be reading it.
    openssl ca -config ca.cnf -gencrl -out crl.new 2>/dev/null
    mv crl.new crl.pem
}

case "${1-}" in
'')
    authority
    certificate server "hdcs test server" 'subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1
extendedKeyUsage=serverAuth'
    certificate client "hdcs test client" 'extendedKeyUsage=clientAuth'
    ;;
client)
    mkdir -p "$2"
    cp ca-cert.pem "$2"
    expired=
    [ "${4-}" != expired ] || expired="-startdate 20200101000000Z -enddate 20200102000000Z"
    certificate "$2/client" "hdcs test client $2" "subjectAltName=$3
extendedKeyUsage=clientAuth" $expired
    ;;
node)
    mkdir -p "$2"
    expired=
    [ "${4-}" != expired ] || expired="-startdate 20200101000000Z -enddate 20200102000000Z"
    certificate "$2/node" "hdcs test node $2" "subjectAltName=$3
extendedKeyUsage=serverAuth,clientAuth" $expired
    ;;
revoke)
    shift
    revoke client "$@"
    ;;
revoke-node)
    shift
    revoke node "$@"
    ;;
*)
    echo "tls.sh: unknown: $1" >&2
    exit 2
    ;;
esac
