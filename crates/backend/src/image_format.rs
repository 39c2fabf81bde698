//! What a file is that holds an image, told by its first bytes.

/// So many tell it.
pub const MAGIC_BYTES: usize = 512;
/// What a file in QEMU's format is.
pub const QCOW2: &str = "a qcow2 image";

const MAGICS: [(&[u8], &str); 9] = [
    (b"QFI\xfb", QCOW2),
    (b"KDMV", "a VMDK image"),
    (b"vhdxfile", "a VHDX image"),
    (b"conectix", "a VHD image"),
    (b"QED\0", "a QED image"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\xfd7zXZ\0", "compressed by xz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
];

/// What a file is that begins so, if it is no raw image.
pub fn of(begin: &[u8]) -> Option<&'static str> {
    let mut magics = MAGICS.iter();
    magics
        .find(|(magic, _)| begin.starts_with(magic))
        .map(|&(_, what)| what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_format_is_told_by_the_first_bytes_and_guesses_nothing_else() {
        for (magic, what) in MAGICS {
            assert_eq!(of(&[magic, b"and more"].concat()), Some(what));
            assert_eq!(of(&magic[1..]), None);
        }
        assert_eq!(of(b"\xebfat"), None);
        assert_eq!(of(b""), None);
    }
}
