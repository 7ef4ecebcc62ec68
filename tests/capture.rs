//! Captures and graphs: the guard, what it offers, and what graphs keep alive.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::with_stream;
use rstream::capture::{Global, Relaxed, ThreadLocal, capture_mode};
use rstream::{
    Api, Buffer, CaptureMode, CaptureStatus, Error, Event, EventOptions, Graph, GreenContext, ManagedAttach, NodeKind,
    Pattern, Status, Stream, StreamOptions, testing,
};

const LONG: Option<Duration> = Some(Duration::from_secs(60));

fn synchronize(api: &Api<'_>, stream: &Stream) -> rstream::Result<()> {
    stream.synchronize(api, LONG, &mut || false)
}

/// A host function that counts its runs.
fn counter() -> (Arc<AtomicU32>, impl Fn() + Send + Sync + 'static) {
    let count = Arc::new(AtomicU32::new(0));
    let inside = Arc::clone(&count);
    (count, move || {
        inside.fetch_add(1, Ordering::SeqCst);
    })
}

#[test]
fn a_capture_becomes_a_graph_that_runs_once_for_each_launch() {
    with_stream(|api, stream| {
        let (count, f) = counter();
        let (from, to) = (
            Buffer::pinned(api, stream.device(), 16)?,
            Buffer::managed(api, stream.device(), 16, ManagedAttach::Global)?,
        );
        let capture = stream.begin_capture::<Global>(api)?;
        let node = capture.launch_host_func(api, f)?;
        capture.fill(api, &from, Pattern::U32(7))?;
        capture.copy(api, &to, &from)?;
        assert_eq!(capture.status(api)?, CaptureStatus::Active);
        let info = stream.capture_info(api)?.expect("it captures");
        assert_eq!((info.id, info.dependencies.len()), (capture.id(), 1));
        let graph = capture.end(api)?;
        drop((from, to));
        assert_eq!(count.load(Ordering::SeqCst), 0);
        assert_eq!(
            graph.nodes(api)?.iter().map(|node| node.kind()).collect::<Vec<_>>(),
            [NodeKind::Host, NodeKind::Memset, NodeKind::Memcpy]
        );
        let exec = graph.instantiate(api)?;
        drop(graph);
        for _ in 0..3 {
            exec.launch(api, stream)?;
        }
        synchronize(api, stream)?;
        assert_eq!((count.load(Ordering::SeqCst), node.runs()), (3, 3));
        Ok(())
    });
}

#[test]
fn branches_fork_and_join() {
    with_stream(|api, stream| {
        let other = Stream::new(api, stream.device(), StreamOptions::default())?;
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let order = Arc::clone(&order);
            move || order.lock().unwrap().push(name)
        };
        let capture = stream.begin_capture::<ThreadLocal>(api)?;
        let first = capture.launch_host_func(api, note("first"))?.node();
        let branch = capture.fork(api, &other)?;
        let left = capture.launch_host_func(api, note("left"))?.node();
        let right = branch.launch_host_func(api, note("right"))?.node();
        capture.join(api, &branch)?;
        let last = capture.launch_host_func(api, note("last"))?.node();
        assert_eq!(branch.dependencies(api)?, [right]);
        let graph = capture.end(api)?;
        let mut edges = graph.edges(api)?;
        let mut expected = vec![(first, left), (first, right), (left, last), (right, last)];
        let key = |edge: &(rstream::Node, rstream::Node)| (edge.0.handle(), edge.1.handle());
        edges.sort_by_key(key);
        expected.sort_by_key(key);
        assert_eq!(edges, expected);
        graph.instantiate(api)?.launch(api, stream)?;
        synchronize(api, stream)?;
        let order = order.lock().unwrap();
        assert_eq!((order.len(), order[0], order[3]), (4, "first", "last"));
        Ok(())
    });
}

#[test]
fn a_dropped_capture_is_abandoned_and_its_functions_are_dropped() {
    with_stream(|api, stream| {
        struct Tell(std::sync::mpsc::Sender<()>);
        impl Drop for Tell {
            fn drop(&mut self) {
                self.0.send(()).expect("the test waits");
            }
        }
        let (sender, dropped) = channel();
        let tell = Tell(sender);
        let capture = stream.begin_capture::<Global>(api)?;
        capture.launch_host_func(api, move || _ = &tell)?;
        drop(capture);
        assert_eq!(stream.capture_status(api)?, CaptureStatus::None);
        dropped.recv_timeout(Duration::from_secs(60)).expect("dropped with the graph");
        assert!(stream.query(api)?);
        stream.begin_capture::<Relaxed>(api)?.abandon();
        assert!(stream.query(api)?);
        Ok(())
    });
}

#[test]
fn a_relaxed_capture_may_end_on_another_thread() {
    with_stream(|api, stream| {
        let (count, f) = counter();
        let capture = stream.begin_capture::<Relaxed>(api)?;
        capture.launch_host_func(api, f)?;
        let graph =
            thread::scope(|scope| scope.spawn(move || Api::attach(|api| capture.end(api))).join().expect("no panic"))??;
        graph.instantiate(api)?.launch(api, stream)?;
        synchronize(api, stream)?;
        assert_eq!(count.load(Ordering::SeqCst), 1);
        Ok(())
    });
}

#[test]
fn a_function_that_runs_once_is_refused_and_comes_back() {
    with_stream(|api, stream| {
        let capture = stream.begin_capture::<Global>(api)?;
        let refused = stream.launch_host_func(api, || 5).expect_err("it captures");
        assert_eq!(refused.error.status(), Status::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!((refused.returned)(), 5);
        assert_eq!(capture.status(api)?, CaptureStatus::Active);
        drop(capture);
        let graph = Graph::new(api, stream.device())?;
        let stranger = Graph::new(api, stream.device())?.add_empty_node(api, &[])?;
        let (count, f) = counter();
        let refused = graph.add_host_node(api, &[stranger], f).expect_err("of another graph");
        assert!(matches!(refused.error, Error::InvalidValue { .. }));
        (refused.returned)();
        assert_eq!(count.load(Ordering::SeqCst), 1);
        Ok(())
    });
}

#[test]
fn a_capture_into_a_graph() {
    with_stream(|api, stream| {
        let graph = Graph::new(api, stream.device())?;
        let (count, f) = counter();
        let first = graph.add_host_node(api, &[], f)?.node();
        let capture = stream.begin_capture_to_graph::<Global>(api, &graph, &[first])?;
        assert_eq!(capture.dependencies(api)?, [first]);
        assert_eq!(graph.nodes(api).unwrap_err().status(), Status::STREAM_CAPTURE_UNSUPPORTED);
        let second = capture.launch_host_func(api, || ())?.node();
        capture.set_dependencies(api, &[first])?;
        capture.add_dependencies(api, &[second])?;
        assert_eq!(capture.end(api)?, graph);
        assert_eq!(graph.edges(api)?, [(first, second)]);
        graph.instantiate(api)?.launch(api, stream)?;
        synchronize(api, stream)?;
        assert_eq!(count.load(Ordering::SeqCst), 1);
        Ok(())
    });
}

#[test]
fn events_inside_and_across_the_border() {
    with_stream(|api, stream| {
        let (inside, outside) = (
            Event::new(api, stream.device(), EventOptions::default())?,
            Event::new(api, stream.device(), EventOptions::default())?,
        );
        stream.record(api, &outside)?;
        let capture = stream.begin_capture::<Global>(api)?;
        capture.record(api, &inside)?;
        assert_eq!(inside.query(api).unwrap_err().status(), Status::CAPTURED_EVENT);
        assert_eq!(capture.wait_event(api, &outside).unwrap_err().status(), Status::STREAM_CAPTURE_ISOLATION);
        capture.wait_event(api, &inside)?;
        capture.wait_external(api, &outside)?;
        capture.record_external(api, &outside)?;
        let graph = capture.end(api)?;
        assert_eq!(graph.nodes(api)?.len(), 2);
        graph.instantiate(api)?.launch(api, stream)?;
        synchronize(api, stream)?;
        assert!(outside.query(api)?);
        assert_eq!(stream.wait_external(api, &outside).unwrap_err().status(), Status::ILLEGAL_STATE);
        Ok(())
    });
}

#[test]
fn a_panic_in_a_host_function_is_kept_and_the_launch_goes_on() {
    with_stream(|api, stream| {
        let graph = Graph::new(api, stream.device())?;
        let (count, after) = counter();
        let bad = graph.add_host_node(api, &[], || panic!("on purpose"))?;
        graph.add_host_node(api, &[bad.node()], after)?;
        let exec = graph.instantiate(api)?;
        for _ in 0..20 {
            exec.launch(api, stream)?;
        }
        synchronize(api, stream)?;
        assert_eq!((count.load(Ordering::SeqCst), bad.runs()), (20, 20));
        assert_eq!(bad.panics(), vec!["on purpose"; rstream::HostNode::MOST_PANICS]);
        assert_eq!(exec.panics(), bad.panics());
        assert_eq!(graph.host_nodes(api)?.len(), 2);
        Ok(())
    });
}

#[test]
fn host_functions_of_graphs_get_no_token() {
    with_stream(|api, stream| {
        let (sender, seen) = channel();
        let sender = Mutex::new(sender);
        let graph = Graph::new(api, stream.device())?;
        let ask = move || sender.lock().unwrap().send(Api::attach(|_| ())).expect("the test waits");
        graph.add_host_node(api, &[], ask)?;
        graph.instantiate(api)?.launch(api, stream)?;
        synchronize(api, stream)?;
        assert!(matches!(seen.recv(), Ok(Err(Error::NotPermitted { .. }))));
        Ok(())
    });
}

#[test]
fn a_capture_mode_is_popped_in_the_end() {
    with_stream(|api, stream| {
        let device = stream.device();
        let outer = capture_mode(api, device, CaptureMode::Relaxed)?;
        drop(capture_mode(api, device, CaptureMode::ThreadLocal)?);
        drop(outer);
        Ok(())
    });
}

#[test]
fn attached_memory_is_the_streams_and_its_callbacks() {
    with_stream(|api, stream| {
        let device = stream.device();
        let buffer = Buffer::managed(api, device, 64, ManagedAttach::Global)?;
        let again = buffer.clone();
        assert!(matches!(stream.attach::<u32>(api, buffer), Err(Error::InvalidValue { .. })));
        let mut data = stream.attach::<u32>(api, again)?;
        assert_eq!((data.len(), data.is_empty()), (16, false));
        data.fill(api, Pattern::U32(2))?;
        let sum = data.with(api, |data| {
            let data = data.expect("no fault");
            data[0] = 10;
            data.iter().sum::<u32>()
        })?;
        assert_eq!(data.synchronize(api, LONG)?[0], 10);
        assert_eq!(sum.into_result(LONG)?, 2 * 15 + 10);
        let copy = Buffer::pinned(api, device, 64)?;
        data.copy_to(api, &copy)?;
        data.copy_from(api, &copy)?;
        let capture = stream.begin_capture::<Global>(api)?;
        assert_eq!(data.fill(api, Pattern::U8(0)).unwrap_err().status(), Status::STREAM_CAPTURE_UNSUPPORTED);
        drop(capture);
        let buffer = data.detach(api)?;
        let pinned = Buffer::pinned(api, device, 64)?;
        assert!(matches!(stream.attach::<u32>(api, pinned), Err(Error::InvalidValue { .. })));
        synchronize(api, stream)?;
        drop(buffer);
        Ok(())
    });
}

#[test]
fn green_contexts_have_streams() {
    with_stream(|api, stream| {
        let context = GreenContext::new(api, stream.device(), 8)?;
        let green = context.create_stream(api, 0)?;
        assert_eq!(green.green_context(), Some(context.handle()));
        drop(context);
        assert_eq!(green.launch_host_func(api, || 5)?.into_result(LONG)?, 5);
        testing::spin(api, &green, Duration::from_micros(10))?;
        synchronize(api, &green)
    });
}
