//! Makes the declarations of librados and librbd from Ceph's own headers.
//!
//! The libraries are loaded at run time, so that the program also starts where they are not
//! installed, and says what to install when a volume needs them.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "rbd")]
    ceph::generate();
}

#[cfg(feature = "rbd")]
mod ceph {
    use std::path::PathBuf;

    const RADOS: &[&str] = &[
        "rados_cluster_fsid",
        "rados_conf_read_file",
        "rados_conf_set",
        "rados_connect",
        "rados_create",
        "rados_ioctx_create",
        "rados_ioctx_destroy",
        "rados_ioctx_get_id",
        "rados_ioctx_set_namespace",
        "rados_set_pool_full_try",
        "rados_shutdown",
    ];
    const RBD: &[&str] = &[
        "rbd_aio_create_completion",
        "rbd_aio_flush",
        "rbd_aio_get_arg",
        "rbd_aio_get_return_value",
        "rbd_aio_read",
        "rbd_aio_release",
        "rbd_aio_write_zeroes",
        "rbd_aio_writev",
        "rbd_clone3",
        "rbd_close",
        "rbd_create4",
        "rbd_diff_iterate2",
        "rbd_get_features",
        "rbd_get_flags",
        "rbd_get_id",
        "rbd_get_overlap",
        "rbd_get_parent",
        "rbd_get_size",
        "rbd_image_options_create",
        "rbd_image_options_destroy",
        "rbd_image_options_set_uint64",
        "rbd_linked_image_spec_cleanup",
        "rbd_linked_image_spec_list_cleanup",
        "rbd_list_children3",
        "rbd_lock_acquire",
        "rbd_lock_break",
        "rbd_lock_get_owners",
        "rbd_lock_get_owners_cleanup",
        "rbd_metadata_get",
        "rbd_metadata_set",
        "rbd_open",
        "rbd_open_read_only",
        "rbd_poll_io_events",
        "rbd_remove",
        "rbd_resize",
        "rbd_set_image_notification",
        "rbd_snap_create",
        "rbd_snap_get_id",
        "rbd_snap_get_namespace_type",
        "rbd_snap_get_timestamp",
        "rbd_snap_is_protected",
        "rbd_snap_list",
        "rbd_snap_list_end",
        "rbd_snap_remove",
        "rbd_snap_set_by_id",
        "rbd_snap_spec_cleanup",
        "rbd_stat",
        "rbd_watchers_list",
        "rbd_watchers_list_cleanup",
    ];

    pub fn generate() {
        library("rados/librados.h", "Rados", RADOS, "rados.rs");
        library("rbd/librbd.h", "Rbd", RBD, "rbd.rs");
    }

    fn library(header: &str, name: &str, functions: &[&str], file: &str) {
        let mut builder = bindgen::Builder::default()
            .header_contents("all.h", &format!("#include <{header}>"))
            .dynamic_library_name(name)
            .dynamic_link_require_all(true)
            .allowlist_var("EVENT_TYPE_EVENTFD|RBD_IMAGE_OPTION_.*|RBD_WRITE_ZEROES_.*")
            .blocklist_type("iovec")
            .raw_line("use libc::iovec;")
            .generate_comments(false)
            .layout_tests(true);
        for function in functions {
            builder = builder.allowlist_function(function);
        }
        let bindings = builder.generate().unwrap_or_else(|error| {
            panic!(
                "{header} could not be read ({error}): install librbd-dev, librados-dev and \
                 libclang-dev (testenv/setup.sh does), or build with --no-default-features"
            )
        });
        let path = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join(file);
        bindings
            .write_to_file(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}
