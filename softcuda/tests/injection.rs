//! Failures on demand. One test, since an injection strikes whoever calls.
#![allow(clippy::undocumented_unsafe_blocks, reason = "each call is one of the driver's, with pointers of this test")]

use std::ptr::null_mut;

use softcuda::*;

#[test]
fn an_injected_failure_strikes_once_and_a_destroyed_context_answers_709() {
    let (mut context, mut stream) = (null_mut(), null_mut());
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        let id = control::inject("cuStreamCreate", 2, 2);
        assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
        assert_eq!(cuStreamCreate(&mut null_mut(), 1), 2);
        assert_eq!(cuStreamCreate(&mut null_mut(), 1), 0);
        assert!(!control::clear(id));
        // Each counts for itself, and two that are due at once strike one after the other.
        for (code, nth) in [(2, 3), (3, 1), (4, 1)] {
            control::inject("cuEventCreate", code, nth);
        }
        let codes = [(); 4].map(|()| cuEventCreate(&mut null_mut(), 0));
        assert_eq!(codes, [3, 4, 2, 0]);
        let id = control::inject("cuStreamQuery", 719, 1);
        assert!(control::clear(id));
        assert_eq!(cuStreamQuery(stream), 0);
        assert!(control::known_function("cuStreamQuery") && !control::known_function("cuNothing"));
        control::destroy_context(0);
        assert_eq!(cuStreamQuery(stream), 709);
    }
}
