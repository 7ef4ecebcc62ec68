//! What the driver answers, call by call: the cases in `conformance/*.txt`, on softcuda or on a GPU.
//!
//! See `conformance/README.md` for the language and for how two devices are compared.

#[path = "conformance/machine.rs"]
mod machine;
#[path = "conformance/script.rs"]
mod script;

use std::env;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use machine::{Bench, Machine, Outcome, PATIENCE};
use rstream::driver::{Driver, Kind};
use script::{Case, Step};

/// Which device: `gpu`, or `soft`.
const DEVICE: &str = "RSTREAM_TEST_DEVICE";
/// The file that every answer is written to.
const ANSWERS: &str = "RSTREAM_CONFORMANCE_OUT";
/// Runs only the cases whose title contains this.
const ONLY: &str = "RSTREAM_CONFORMANCE_ONLY";
/// If set, every case runs in a process of its own: one that crashes the driver does not end the run.
const ISOLATE_ALL: &str = "RSTREAM_CONFORMANCE_ISOLATE";
/// Set in the process of an isolated case: its title.
const ISOLATED: &str = "RSTREAM_CONFORMANCE_ISOLATED";

/// A call that takes longer than this hangs.
const LONGEST_CALL: Duration = Duration::from_secs(10);
/// A call that has not returned after this `blocks`.
const BLOCKS: Duration = Duration::from_millis(150);
/// The longest that the process of an isolated case may live.
const LONGEST_PROCESS: Duration = Duration::from_secs(60);
/// A line of an isolated case's process that reports a mismatch; others are answers.
const MISMATCH: &str = "mismatch\t";

#[test]
fn every_case() {
    let mut cases = cases();
    if let Ok(title) = env::var(ISOLATED) {
        be_the_process_of(&cases, &title);
    }
    if let Ok(only) = env::var(ONLY) {
        cases.retain(|case| case.title().contains(&only));
    }
    let bench = bench();
    cases.retain(|case| !case.soft || bench.driver.kind() == Kind::Soft);
    // Written case by case: the file of a run that did not end says how far it came.
    let mut answers = env::var(ANSWERS)
        .ok()
        .map(|path| fs::File::create(&path).unwrap_or_else(|error| panic!("{ANSWERS}={path}: {error}")));
    let mut results = Vec::new();
    let mut note = |result: CaseResult| {
        if let Some(file) = &mut answers {
            for line in &result.answers {
                writeln!(file, "{line}").expect("the answers can be written");
            }
        }
        results.push(result);
    };
    let all = env::var_os(ISOLATE_ALL).is_some();
    let (isolated, others): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(|case| case.isolated || all);
    for case in others {
        note(run_case(bench, case));
    }
    let at_once = std::thread::available_parallelism().map_or(4, |cores| cores.get().max(4));
    for some in isolated.chunks(at_once) {
        let some: Vec<CaseResult> = std::thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|case| scope.spawn(|| run_in_a_process(case))).collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        some.into_iter().for_each(&mut note);
    }
    let mismatches: Vec<&str> = results.iter().flat_map(|result| &result.mismatches).map(String::as_str).collect();
    let bad = results.iter().filter(|result| !result.mismatches.is_empty()).count();
    eprintln!("{} cases on {:?}, {bad} with mismatches", results.len(), bench.driver.kind());
    assert!(mismatches.is_empty(), "{} mismatches in {bad} cases:\n{}", mismatches.len(), mismatches.join("\n"));
}

/// All cases, in the order of the files' names.
fn cases() -> Vec<Case> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance");
    let entries = fs::read_dir(directory).expect("the case files are there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "txt"));
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let theme = file.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).expect("a text");
        cases.extend(script::parse(&theme, &text).unwrap_or_else(|error| panic!("tests/conformance/{error}")));
    }
    let mut titles: Vec<String> = cases.iter().map(Case::title).collect();
    titles.sort();
    let twice = titles.windows(2).find(|pair| pair[0] == pair[1]);
    assert_eq!(twice, None, "two cases have one name");
    cases
}

fn bench() -> &'static Bench {
    let driver = match env::var(DEVICE).as_deref() {
        Ok("gpu") => Driver::cuda().unwrap_or_else(|error| panic!("{DEVICE}=gpu: {error}")),
        Ok("soft") | Err(_) => Driver::soft(),
        Ok(other) => panic!("{DEVICE}={other}: expected soft or gpu"),
    };
    Box::leak(Box::new(Bench::new(driver)))
}

/// What a case gave.
#[derive(Default)]
struct CaseResult {
    /// Tab-separated: case, step, answer.
    answers: Vec<String>,
    mismatches: Vec<String>,
}

/// A thread of a case. It makes one call at a time.
struct Worker {
    jobs: Sender<Box<dyn FnOnce() -> Outcome + Send>>,
    replies: Receiver<Outcome>,
    busy: bool,
    thread: JoinHandle<()>,
}

impl Worker {
    fn new(bench: &'static Bench) -> Worker {
        let (jobs, todo) = channel::<Box<dyn FnOnce() -> Outcome + Send>>();
        let (done, replies) = channel();
        let thread = std::thread::spawn(move || {
            bench.bind();
            for job in todo {
                if done.send(job()).is_err() {
                    return;
                }
            }
        });
        Worker { jobs, replies, busy: false, thread }
    }

    fn start(&mut self, job: impl FnOnce() -> Outcome + Send + 'static) {
        self.jobs.send(Box::new(job)).expect("the thread lives as long as its worker");
        self.busy = true;
    }

    /// The answer, or `None` when there is none for `time`.
    fn finish(&mut self, time: Duration) -> Option<Outcome> {
        match self.replies.recv_timeout(time) {
            Ok(outcome) => {
                self.busy = false;
                Some(outcome)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                self.busy = false;
                Some(Err("the thread panicked".into()))
            }
        }
    }
}

/// A case that runs.
struct Run<'a> {
    case: &'a Case,
    bench: &'static Bench,
    machine: &'static Machine,
    workers: Vec<Option<Worker>>,
    /// The line that was begun last.
    doing: String,
    result: CaseResult,
}

fn run_case(bench: &'static Bench, case: &Case) -> CaseResult {
    let machine = Machine::new(bench);
    let workers = (0..10).map(|_| None).collect();
    let mut run = Run { case, bench, machine, workers, doing: String::new(), result: CaseResult::default() };
    for step in &case.steps {
        run.step(step);
    }
    run.clean_up();
    run.result
}

impl Run<'_> {
    fn step(&mut self, step: &Step) {
        let until = Instant::now() + PATIENCE;
        self.doing.clone_from(&step.text);
        let mut answer = self.answer(step);
        let expected = |answer: &str| match &step.expect {
            Some(expect) => script::matches(answer, expect),
            None => answer.split_whitespace().next() == Some("0"),
        };
        while step.eventually && !expected(&answer) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            answer = self.answer(step);
        }
        let case = self.case.title();
        let number = self.result.answers.len() + 1;
        self.result.answers.push(format!("{case}\t{number} {}\t{answer}", step.text));
        if !expected(&answer) {
            let wanted = step.expect.as_ref().map_or("0".into(), |words| words.join(" "));
            let file = format!("tests/conformance/{}.txt:{}", self.case.theme, step.line);
            let documented = if self.case.documented { ", documented" } else { "" };
            let text = &step.text;
            self.result
                .mismatches
                .push(format!("{case}{documented}\n    {file}: {text}\n    expected {wanted}, got {answer}"));
        }
    }

    fn answer(&mut self, step: &Step) -> String {
        let words: Vec<&str> = step.words.iter().map(String::as_str).collect();
        let (machine, bench) = (self.machine, self.bench);
        let outcome = if let Some(outcome) = machine.local(&words) {
            outcome
        } else if words == ["finish"] {
            match &mut self.workers[step.thread] {
                Some(worker) if worker.busy => self.reply(step),
                _ => Err("the thread makes no call".into()),
            }
        } else {
            let words = step.words.clone();
            let thread = step.thread;
            let worker = self.workers[thread].get_or_insert_with(|| Worker::new(bench));
            if worker.busy {
                return "error: the thread's last call has not returned".into();
            }
            worker.start(move || {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                machine.call(thread, &words)
            });
            self.reply(step)
        };
        outcome.unwrap_or_else(|error| format!("error: {error}"))
    }

    fn reply(&mut self, step: &Step) -> Outcome {
        let blocks = step.expect.as_ref().is_some_and(|words| words == &["blocks"]);
        let time = if blocks { BLOCKS } else { LONGEST_CALL };
        let worker = self.workers[step.thread].as_mut().expect("started");
        match worker.finish(time) {
            Some(outcome) => outcome,
            None if blocks => Ok("blocks".into()),
            None => {
                self.wait_for_all();
                Ok(format!("blocks (released after {} s)", LONGEST_CALL.as_secs()))
            }
        }
    }

    /// Releases all that holds a stream until every thread's call has returned. A call that does not return then never
    /// will, and no later case could run.
    fn wait_for_all(&mut self) {
        let until = Instant::now() + LONGEST_CALL;
        for (number, worker) in self.workers.iter_mut().enumerate() {
            let Some(worker) = worker else { continue };
            while worker.busy {
                self.machine.release_all();
                worker.finish(Duration::from_millis(2));
                if Instant::now() > until {
                    give_up(&format!("{}: {}: thread t{number} hangs in the driver", self.case.title(), self.doing));
                }
            }
        }
    }

    /// Runs `job` on a thread of the case, with all that holds a stream released.
    fn on(&mut self, thread: usize, job: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
        let bench = self.bench;
        let worker = self.workers[thread].get_or_insert_with(|| Worker::new(bench));
        worker.start(job);
        let until = Instant::now() + LONGEST_CALL;
        loop {
            self.machine.release_all();
            if let Some(outcome) = worker.finish(Duration::from_millis(2)) {
                return outcome;
            }
            if Instant::now() > until {
                give_up(&format!("{}: cleaning up hangs in the driver", self.case.title()));
            }
        }
    }

    fn clean_up(&mut self) {
        let machine = self.machine;
        self.wait_for_all();
        if self.case.isolated {
            return;
        }
        for (stream, thread) in machine.open_captures() {
            let _ = self.on(thread, move || {
                machine.end_capture(stream);
                Ok(String::new())
            });
        }
        for thread in 0..self.workers.len() {
            if self.workers[thread].is_some() || thread == 0 {
                let _ = self.on(thread, move || {
                    machine.bench().bind();
                    machine.reset_capture_mode();
                    Ok(String::new())
                });
            }
        }
        let health = self.on(0, move || {
            machine.synchronize();
            machine.destroy_all();
            Ok(machine.health())
        });
        if health.as_deref() != Ok("0 0 0 0") {
            let case = self.case.title();
            let text = "ctx_sync, query null, alloc and free, after the case";
            self.result.mismatches.push(format!("{case}\n    {text}\n    expected 0 0 0 0, got {health:?}"));
        }
        for worker in self.workers.drain(..).flatten() {
            drop(worker.jobs);
            let _ = worker.thread.join();
        }
    }
}

/// Ends the program: a thread that never returns from the driver leaves no later case a chance.
fn give_up(why: &str) -> ! {
    // Not by `eprintln`, which the test harness would keep for itself.
    let _ = writeln!(std::io::stderr(), "{why}; giving up");
    std::process::exit(101);
}

/// Runs the case in this program, started again for it alone.
fn run_in_a_process(case: &Case) -> CaseResult {
    let title = case.title();
    let program = env::current_exe().expect("this program has a path");
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let place = env::temp_dir().join(format!("rstream-conformance-{}-{number}.txt", std::process::id()));
    let _ = fs::remove_file(&place);
    let mut child = Command::new(program)
        .args(["every_case", "--exact", "--test-threads=1"])
        .env(ISOLATED, &title)
        .env(ANSWERS, &place)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{title}: {error}"));
    let until = Instant::now() + LONGEST_PROCESS;
    let end = loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => break status.to_string(),
            None if Instant::now() > until => {
                let _ = child.kill();
                let _ = child.wait();
                break format!("killed after {} s", LONGEST_PROCESS.as_secs());
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let text = fs::read_to_string(&place).unwrap_or_default();
    let _ = fs::remove_file(&place);
    let mut result = CaseResult::default();
    for line in text.lines() {
        match line.strip_prefix(MISMATCH) {
            Some(mismatch) => result.mismatches.push(mismatch.replace('\x1f', "\n")),
            None => result.answers.push(line.to_owned()),
        }
    }
    if result.answers.len() < case.steps.len() {
        result.mismatches.push(format!("{title}\n    its process ended early: {end}"));
    }
    result
}

/// Runs one case and ends the process: nothing can be cleaned up in a context that is lost.
fn be_the_process_of(cases: &[Case], title: &str) -> ! {
    let case = cases.iter().find(|case| case.title() == title).expect("the parent found it");
    let result = run_case(bench(), case);
    let mismatches = result.mismatches.iter().map(|text| format!("{MISMATCH}{}", text.replace('\n', "\x1f")));
    let text: String = result.answers.iter().cloned().chain(mismatches).map(|line| line + "\n").collect();
    fs::write(env::var(ANSWERS).expect("the parent says where"), text).expect("the place can be written");
    std::process::exit(0);
}
