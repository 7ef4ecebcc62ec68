//! Stages of a kernel and an ordered native callback, without Python: microseconds for a stage, as a line of JSON.
//!
//! On GPU 0, or with `RSTREAM_DEVICE` on another device. `benches/compare.py --pipeline PROGRAM` puts the figures beside
//! those of the C floor.

use std::time::{Duration, Instant};

use rstream::{Api, Device, Result, Signal, Stream, StreamOptions, testing};

const REPEATS: usize = 7;

fn stage(api: &Api<'_>, device: Device, signal: Signal, kernel: Duration) -> Result<f64> {
    let stream = Stream::new(api, device, StreamOptions { signal, ..StreamOptions::default() })?;
    let callback = stream.reusable_callback(|_status| ());
    let stages = if kernel.is_zero() { 2000 } else { 500 };
    let mut runs = [0.0; REPEATS];
    for run in &mut runs {
        let started = Instant::now();
        for _ in 0..stages {
            testing::spin(api, &stream, kernel)?;
            callback.enqueue(api)?;
        }
        stream.synchronize(api, None, &mut || false)?;
        *run = started.elapsed().as_secs_f64() * 1e6 / f64::from(stages);
    }
    runs.sort_by(f64::total_cmp);
    Ok(runs[REPEATS / 2])
}

fn main() {
    let figures = Api::attach(|api| {
        let device = Device::default(api)?;
        let mut figures = Vec::new();
        for (name, signal) in [("memory", Signal::Memory), ("driver", Signal::Driver)] {
            for (kernel, microseconds) in [("empty", 0), ("20", 20)] {
                let figure = stage(api, device, signal, Duration::from_micros(microseconds))?;
                figures.push(format!("\"{name}_{kernel}\": {figure:.3}"));
            }
        }
        Ok::<_, rstream::Error>(figures.join(", "))
    });
    match figures {
        Ok(Ok(figures)) => println!("{{{figures}}}"),
        Ok(Err(error)) | Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
