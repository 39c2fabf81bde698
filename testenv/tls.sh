#!/bin/sh
# Make a certificate authority, and a server's and a client's certificate signed by it:
#   tls.sh DIR
# DIR gets ca-cert.pem, server-cert.pem, server-key.pem, client-cert.pem and client-key.pem, the
# names that libnbd and QEMU look for. The server's certificate is for localhost, 127.0.0.1 and
# ::1. For tests only: the keys have no passphrase and are valid for two days.
set -eu
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
cd "$1"
umask 077

key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1.sec1"
    openssl pkcs8 -topk8 -nocrypt -in "$1.sec1" -out "$1"
    rm "$1.sec1"
}

# certificate NAME EXTENSIONS: NAME-cert.pem and NAME-key.pem, signed by the authority
certificate() {
    key "$1-key.pem"
    printf '%s\n' "$2" > "$1.ext"
    openssl req -new -key "$1-key.pem" -subj "/CN=hdcs test $1" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
        -days 2 -sha256 -extfile "$1.ext" -out "$1-cert.pem" 2>/dev/null
    rm "$1.csr" "$1.ext"
}

key ca-key.pem
openssl req -x509 -new -key ca-key.pem -sha256 -days 2 -subj "/CN=hdcs test authority" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -out ca-cert.pem
certificate server 'subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1
extendedKeyUsage=serverAuth'
certificate client 'extendedKeyUsage=clientAuth'
