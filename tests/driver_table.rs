//! The driver table: versions, missing functions, and refused calls on the software driver.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rstream::driver::{Driver, Kind};
use rstream::{Api, Buffer, Device, Error, Pattern, Signal, Status, Stream, StreamOptions, testing};

/// An injected failure strikes the next call of the process: tests that inject one, or whose calls could be struck, take
/// turns.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_function_newer_than_the_driver_is_refused_and_never_called() {
    // SAFETY: the table is the software driver's.
    let driver = unsafe { Driver::with_table(Kind::Soft, Driver::soft_table(), 12_070) };
    // SAFETY: the call is refused before the NULL pointer can be used.
    let refused = unsafe { driver.cuStreamGetDevice(std::ptr::null_mut(), std::ptr::null_mut()) };
    assert_eq!(refused, Err(Error::DriverTooOld { function: "cuStreamGetDevice", needed: 12_080, found: 12_070 }));
}

#[test]
fn a_missing_function_is_told_and_nothing_panics() {
    let mut table = Driver::soft_table();
    table.cuStreamGetId = None;
    // SAFETY: the table is the software driver's, less one function.
    let driver = unsafe { Driver::with_table(Kind::Soft, table, 13_000) };
    let mut id = 0;
    // SAFETY: the call is refused before anything is used.
    let refused = unsafe { driver.cuStreamGetId(std::ptr::null_mut(), &raw mut id) };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("cuStreamGetId") && text.contains("lacks it"), "{text}");
}

#[test]
fn a_refused_enqueue_gives_the_closure_back_and_drops_nothing_it_owns() {
    let _alone = alone();
    Api::attach(|api| {
        let options = StreamOptions { signal: Signal::Driver, ..StreamOptions::default() };
        let stream = Stream::new(api, Device::soft(api, 1)?, options)?;
        let owned = Arc::new(());
        let held = Arc::clone(&owned);
        let injected = testing::inject("cuStreamAddCallback", Status::OUT_OF_MEMORY.code(), 1)?;
        let refused = stream.add_callback(api, move |_| Arc::strong_count(&held)).unwrap_err();
        assert_eq!(refused.error.status(), Status::OUT_OF_MEMORY);
        assert_eq!(stream.pending(), 0);
        assert_eq!((refused.returned)(Status::SUCCESS), 2);
        assert_eq!(Arc::strong_count(&owned), 1);
        drop(injected);
        stream.add_callback(api, |_| ())?.into_result(None)
    })
    .unwrap()
    .unwrap();
}

#[test]
fn bad_names_of_devices_are_quoted() {
    Api::attach(|api| {
        for text in ["", "soft:", "soft:x", "softer", "gpu", "-1"] {
            let error = Device::parse(api, text).unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
        let error = Device::soft(api, 99).unwrap_err().to_string();
        assert!(error.contains("99"), "{error}");
    })
    .unwrap();
}

#[test]
fn an_object_of_another_device_is_refused() {
    let _alone = alone();
    Api::attach(|api| {
        let (a, b) = (Device::soft(api, 0)?, Device::soft(api, 1)?);
        let stream = Stream::new(api, a, StreamOptions::default())?;
        let event = rstream::Event::new(api, b, rstream::EventOptions::default())?;
        let error = stream.record(api, &event).unwrap_err().to_string();
        assert!(error.contains("soft:0") && error.contains("soft:1"), "{error}");
        let buffer = Buffer::device_memory(api, b, 8)?;
        let host = Buffer::pinned(api, b, 8)?;
        for refused in [
            stream.fill(api, &buffer, Pattern::U8(0)),
            stream.copy(api, &buffer, &host),
            stream.copy(api, &host, &buffer),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("soft:1") && error.contains("soft:0"), "{error}");
        }
        // Host memory is portable.
        stream.fill(api, &host, Pattern::U8(0))?;
        let other = Stream::new(api, b, StreamOptions::default())?;
        // SAFETY: `other` is alive throughout.
        let adopted = unsafe { Stream::from_raw(api, a, other.handle()?, None) };
        assert!(matches!(adopted, Err(Error::InvalidValue { .. })));
        Ok::<(), Error>(())
    })
    .unwrap()
    .unwrap();
}

#[test]
fn what_queued_work_uses_is_kept_whatever_an_event_answers() {
    let _alone = alone();
    struct Told(Arc<AtomicBool>);
    impl Drop for Told {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    Api::attach(|api| {
        let stream = Stream::new(api, Device::soft(api, 1)?, StreamOptions::default())?;
        let (dst, src) = (Buffer::pinned(api, stream.device(), 8)?, Buffer::pinned(api, stream.device(), 8)?);
        let hold = testing::hold(api, &stream)?;
        let gone = Arc::new(AtomicBool::new(false));
        // The first look of the background thread at its event is refused, as by somebody's capture.
        let refused = testing::inject("cuEventQuery", 900, 1)?;
        // SAFETY: both buffers live to the end of this test, which waits for the stream.
        unsafe { stream.copy_raw(api, dst.ptr(), src.ptr(), 8, Told(Arc::clone(&gone))) }?;
        while !refused.is_used() {
            std::thread::yield_now();
        }
        assert!(!gone.load(Ordering::Acquire));
        hold.release();
        stream.synchronize(api, None, &mut || false)?;
        while !gone.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Ok::<(), Error>(())
    })
    .unwrap()
    .unwrap();
}

#[test]
fn a_hold_returns_even_if_nothing_can_be_kept_for_it() {
    let _alone = alone();
    Api::attach(|api| {
        let stream = Stream::new(api, Device::soft(api, 1)?, StreamOptions::default())?;
        testing::hold(api, &stream)?.release();
        stream.synchronize(api, None, &mut || false)?;
        let refused = testing::inject("cuEventRecord", Status::OUT_OF_MEMORY.code(), 1)?;
        let hold = testing::hold(api, &stream)?;
        drop(refused);
        assert!(!stream.query(api)?);
        hold.release();
        stream.synchronize(api, None, &mut || false)
    })
    .unwrap()
    .unwrap();
}
