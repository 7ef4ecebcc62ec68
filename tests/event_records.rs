//! Which record of an event a completion is of. In a process of its own, with fewer streams than hardware channels: of two
//! that share one, a stream waits for what the other waits for.

#[allow(dead_code, reason = "of a test that has one stream")]
mod common;

use std::sync::Mutex;
use std::time::Duration;

use common::device;
use rstream::{Api, Completion, Error, Event, EventOptions, Stream, StreamOptions, testing};

const PATIENCE: Duration = Duration::from_secs(60);
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_completion_of_an_event_is_of_the_record_that_it_had_then() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    Api::attach(|api| {
        let device = device(api)?;
        let stream = || Stream::new(api, device, StreamOptions::default());
        let (first, second, third) = (stream()?, stream()?, stream()?);
        let into_result = |completion: Completion<()>| completion.into_result(Some(PATIENCE));
        for handle_is_known in [false, true] {
            let event = Event::new(api, device, EventOptions::default())?;
            if handle_is_known {
                assert!(event.handle()? != 0);
            }
            assert!(event.completion(api)?.is_done(), "never recorded");
            let holds = [testing::hold(api, &first)?, testing::hold(api, &second)?, testing::hold(api, &third)?];
            first.record(api, &event)?;
            let of_first = [event.completion(api)?, event.completion(api)?];
            second.record(api, &event)?;
            let of_second = event.completion(api)?;
            third.record(api, &event)?;
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
            into_result(of_third)?;
        }
        Ok::<(), Error>(())
    })
    .unwrap()
    .unwrap();
}

#[test]
fn a_completion_that_waits_while_the_handle_is_given_out_is_of_its_record_too() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    Api::attach(|api| {
        let device = device(api)?;
        let stream = || Stream::new(api, device, StreamOptions::default());
        let (first, second) = (stream()?, stream()?);
        let event = Event::new(api, device, EventOptions::default())?;
        let holds = [testing::hold(api, &first)?, testing::hold(api, &second)?];
        first.record(api, &event)?;
        let of_first = event.completion(api)?;
        let handle = event.handle()?;
        second.record(api, &event)?;
        assert_eq!(event.handle()?, handle);
        holds[0].release();
        of_first.into_result(Some(PATIENCE))?;
        assert!(!event.query(api)?);
        drop(holds);
        second.synchronize(api, Some(PATIENCE), &mut || false)
    })
    .unwrap()
    .unwrap();
}
