//! Which record of an event a completion is of. In a process of its own, with fewer streams than hardware channels: of two
//! that share one, a stream waits for what the other waits for.

mod common;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::{alone, with_stream};
use rstream::capture::Relaxed;
use rstream::{Api, Completion, Error, Event, EventOptions, Result, Stream, StreamOptions, testing};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// As [`with_stream`], one test at a time, with an event.
fn with_event(test: impl FnOnce(&Api<'_>, &Stream, &Event) -> Result<()>) {
    let _alone = alone();
    with_stream(|api, stream| test(api, stream, &Event::new(api, stream.device(), EventOptions::default())?));
}

fn another(api: &Api<'_>, stream: &Stream) -> Result<Stream> {
    Stream::new(api, stream.device(), StreamOptions::default())
}

fn each_completion_is_of_the_record_that_the_event_had_then(
    api: &Api<'_>,
    first: &Stream,
    event: &Event,
) -> Result<()> {
    let (second, third) = (another(api, first)?, another(api, first)?);
    let into_result = |completion: Completion<()>| completion.into_result(PATIENCE);
    assert!(event.completion(api)?.is_done(), "never recorded");
    let holds = [testing::hold(api, first)?, testing::hold(api, &second)?, testing::hold(api, &third)?];
    first.record(api, event)?;
    let of_first = [event.completion(api)?, event.completion(api)?];
    second.record(api, event)?;
    let of_second = event.completion(api)?;
    third.record(api, event)?;
    let of_third = event.completion(api)?;
    holds[1].release();
    into_result(of_second)?;
    assert!(of_first.iter().all(|completion| !completion.is_done()) && !of_third.is_done());
    assert!(!event.query(api)?);
    holds[0].release();
    of_first.into_iter().try_for_each(into_result)?;
    assert!(!of_third.is_done());
    event.close();
    holds[2].release();
    into_result(of_third)
}

#[test]
fn a_completion_is_of_the_record_that_the_event_had_then() {
    with_event(each_completion_is_of_the_record_that_the_event_had_then);
}

#[test]
fn so_it_is_when_the_handle_is_known() {
    with_event(|api, first, event| {
        assert!(event.handle()? != 0);
        each_completion_is_of_the_record_that_the_event_had_then(api, first, event)
    });
}

#[test]
fn so_it_is_when_the_handle_becomes_known_while_it_waits() {
    with_event(|api, first, event| {
        let second = another(api, first)?;
        let holds = [testing::hold(api, first)?, testing::hold(api, &second)?];
        first.record(api, event)?;
        let of_first = event.completion(api)?;
        let handle = event.handle()?;
        second.record(api, event)?;
        assert_eq!(event.handle()?, handle);
        holds[0].release();
        of_first.into_result(PATIENCE)?;
        assert!(!event.query(api)?);
        drop(holds);
        second.synchronize(api, PATIENCE, &mut || false)
    });
}

#[test]
fn a_record_of_another_library_in_a_capture_breaks_neither_the_capture_nor_the_completion() {
    with_event(|api, first, event| {
        let second = another(api, first)?;
        let hold = testing::hold(api, first)?;
        first.record(api, event)?;
        let of_first = event.completion(api)?;
        let (handle, into) = (event.handle()?, second.handle()?);
        let capture = second.begin_capture::<Relaxed>(api)?;
        // SAFETY: both handles are alive and of one context.
        unsafe { first.device().driver().cuEventRecord(handle as _, into as _) }?;
        hold.release();
        of_first.into_result(PATIENCE)?;
        capture.end(api).map(drop)
    });
}

#[test]
fn a_callback_cannot_give_the_handle_out_while_a_completion_waits() {
    with_event(|api, first, event| {
        let (second, third) = (another(api, first)?, another(api, first)?);
        let holds = [testing::hold(api, first)?, testing::hold(api, &second)?];
        first.record(api, event)?;
        let of_first = event.completion(api)?;
        let known = event.clone();
        let refused = third.add_callback(api, move |_| known.handle())?.into_result(PATIENCE)?;
        assert!(matches!(refused, Err(Error::NotPermitted { .. })), "{refused:?}");
        second.record(api, event)?;
        holds[0].release();
        of_first.into_result(PATIENCE)?;
        drop(holds);
        let known = event.clone();
        let handle = third.add_callback(api, move |_| known.handle())?.into_result(PATIENCE)??;
        assert_eq!(event.handle()?, handle);
        Ok(())
    });
}

/// Synchronizes the event on another thread, and lets `meanwhile` run when that waits.
fn synchronize_beside(event: &Event, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
    let (waits, waiting) = mpsc::channel();
    thread::scope(|scope| {
        let waiter =
            scope.spawn(move || Api::attach(|api| event.synchronize(api, PATIENCE, &mut || waits.send(()).is_err())));
        waiting.recv().expect("it waits");
        let result = meanwhile();
        let waited = waiter.join().unwrap()?;
        // Until here, since the wait is given up when nobody receives.
        drop(waiting);
        result.and(waited)
    })
}

#[test]
fn a_wait_is_of_the_record_that_the_event_had_then() {
    with_event(|api, first, event| {
        let second = another(api, first)?;
        let holds = [testing::hold(api, first)?, testing::hold(api, &second)?];
        first.record(api, event)?;
        synchronize_beside(event, || {
            second.record(api, event)?;
            holds[0].release();
            first.synchronize(api, PATIENCE, &mut || false)
        })?;
        assert!(!event.query(api)?);
        Ok(())
    });
}

#[test]
fn a_wait_breaks_no_capture_that_gets_the_event_meanwhile() {
    with_event(|api, first, event| {
        let second = another(api, first)?;
        let hold = testing::hold(api, first)?;
        first.record(api, event)?;
        let mut graph = None;
        synchronize_beside(event, || {
            let capture = second.begin_capture::<Relaxed>(api)?;
            second.record(api, event)?;
            hold.release();
            first.synchronize(api, PATIENCE, &mut || false)?;
            graph = Some(capture.end(api)?);
            Ok(())
        })?;
        assert!(graph.is_some());
        Ok(())
    });
}

#[test]
fn a_wait_for_an_event_that_others_know_ends_when_a_capture_gets_it() {
    for closed in [false, true] {
        with_event(|api, first, event| {
            let second = another(api, first)?;
            let hold = testing::hold(api, first)?;
            first.record(api, event)?;
            assert!(event.handle()? != 0);
            let mut capture = None;
            let waited = synchronize_beside(event, || {
                capture = Some(second.begin_capture::<Relaxed>(api)?);
                second.record(api, event)?;
                if closed {
                    event.close();
                }
                Ok(())
            });
            assert!(matches!(waited, Err(Error::Capture { .. })), "{waited:?}");
            capture.expect("begun above").end(api)?;
            hold.release();
            Ok(())
        });
    }
}

#[test]
fn a_callback_may_give_the_handle_out_beside_a_wait() {
    with_event(|api, first, event| {
        let second = another(api, first)?;
        let hold = testing::hold(api, first)?;
        first.record(api, event)?;
        synchronize_beside(event, || {
            let known = event.clone();
            let handle = second.add_callback(api, move |_| known.handle())?.into_result(PATIENCE)??;
            assert_eq!(event.handle()?, handle);
            hold.release();
            Ok(())
        })
    });
}
