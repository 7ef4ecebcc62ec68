//! A fault in the middle of a queue. One test, in a process of its own: the device is lost afterwards.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::with_stream;
use rstream::{Buffer, Error, Event, EventOptions, Pattern, Status, Stream, StreamOptions, testing};

#[test]
fn behind_a_fault_callbacks_run_once_with_the_status_and_nothing_else_runs() {
    with_stream(|api, stream| {
        let fault = Status::ILLEGAL_ADDRESS;
        let runs = Arc::new(AtomicUsize::new(0));
        let count = || {
            let runs = Arc::clone(&runs);
            move || runs.fetch_add(1, Ordering::AcqRel)
        };
        let other = Stream::new(api, stream.device(), StreamOptions::default())?;
        let event = Event::new(api, stream.device(), EventOptions::default())?;
        let before = stream.add_callback(api, |status| status)?;
        let hold = testing::hold(api, stream)?;
        testing::fault(api, stream, fault.code())?;
        let kept = Buffer::device_memory(api, stream.device(), 4096)?;
        stream.fill(api, &kept, Pattern::U8(1))?;
        drop(kept);
        let (a, b, c) = (count(), count(), count());
        let callback = stream.add_callback(api, move |status| (status, a()))?;
        let function = stream.launch_host_func(api, b)?;
        let continuation = stream.then(api, move |_| c())?;
        let notice = stream.completion(api)?;
        stream.record(api, &event)?;
        let mark = event.completion(api)?;
        assert_eq!(before.into_result(None)?, Status::SUCCESS);
        hold.release();

        assert_eq!(callback.into_result(None)?.0, fault);
        let not_run = Error::Fault { status: fault };
        function.wait_done(None, &mut || false)?;
        assert_eq!(function.status(), Some(fault));
        assert_eq!(function.into_result(None), Err(not_run.clone()));
        assert_eq!(continuation.into_result(None), Err(not_run));
        let not_reached = Error::NotReached { status: fault };
        assert_eq!(notice.into_result(None), Err(not_reached.clone()));
        assert_eq!(mark.into_result(None), Err(not_reached));
        assert_eq!(runs.load(Ordering::Acquire), 1);
        assert_eq!(stream.pending(), 0);

        // Everything that follows answers the code, gives closures back, and hangs nowhere.
        for result in [
            stream.query(api).map(drop),
            other.synchronize(api, Some(Duration::from_secs(10)), &mut || false),
            event.query(api).map(drop),
        ] {
            assert_eq!(result.unwrap_err().status(), fault);
        }
        assert_eq!(stream.query(api), Err(Error::Unusable { status: fault }));
        let refused = stream.add_callback(api, |_| 3).unwrap_err();
        assert_eq!(refused.error.status(), fault);
        assert_eq!((refused.returned)(fault), 3);
        drop((other, event));
        Ok(())
    });
}
