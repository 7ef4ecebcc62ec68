//! A small graph as SVG: a row for each step, boxes with text, arrows downwards.
//!
//! Drawn here, since the library that was tried takes exponential time on dense graphs.

use std::fmt::Write as _;

const ROW: usize = 70;
const HEIGHT: usize = 32;
const GAP: usize = 24;
const CHARACTER: usize = 8;

/// The drawing of the boxes `labels` and the arrows `edges` between them, by their positions.
pub(crate) fn svg(labels: &[String], edges: &[(usize, usize)]) -> String {
    let rows = rows(labels.len(), edges);
    let widths: Vec<usize> = labels.iter().map(|label| label.chars().count() * CHARACTER + 2 * GAP).collect();
    let mut used = vec![GAP; rows.iter().map(|row| row + 1).max().unwrap_or(0)];
    let mut places = Vec::with_capacity(labels.len());
    for (&row, &width) in rows.iter().zip(&widths) {
        places.push((used[row], GAP + row * ROW));
        used[row] += width + GAP;
    }
    let (width, height) = (used.iter().copied().max().unwrap_or(0), GAP + used.len() * ROW);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"monospace\" \
         font-size=\"13\">\n<defs><marker id=\"tip\" markerWidth=\"8\" markerHeight=\"8\" refX=\"7\" refY=\"4\" \
         orient=\"auto\"><path d=\"M0,0 L8,4 L0,8 z\"/></marker></defs>\n"
    );
    for &(from, to) in edges {
        let (x1, y1) = (places[from].0 + widths[from] / 2, places[from].1 + HEIGHT);
        let (x2, y2) = (places[to].0 + widths[to] / 2, places[to].1);
        // Straight where nothing lies between, else around the boxes.
        let bend = if rows[to] == rows[from] + 1 { 0 } else { GAP };
        let middle = usize::midpoint(x1, x2) + bend;
        let through = usize::midpoint(y1, y2);
        writeln!(
            text,
            "<path d=\"M{x1},{y1} Q{middle},{through} {x2},{y2}\" fill=\"none\" stroke=\"black\" \
             marker-end=\"url(#tip)\"/>"
        )
        .expect("a string grows");
    }
    for ((label, (x, y)), width) in labels.iter().zip(places).zip(widths) {
        let label = label.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        writeln!(
            text,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{HEIGHT}\" fill=\"white\" stroke=\"black\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            x + width / 2,
            y + HEIGHT / 2 + 5
        )
        .expect("a string grows");
    }
    text.push_str("</svg>\n");
    text
}

/// The row of each box: below all that it comes after. What is in a circle goes below the rest.
fn rows(count: usize, edges: &[(usize, usize)]) -> Vec<usize> {
    let mut rows = vec![0; count];
    let mut placed = vec![false; count];
    in_order(count, edges, |node, after| {
        placed[node] = true;
        for &next in after {
            rows[next] = rows[next].max(rows[node] + 1);
        }
    });
    let below = (0..count).filter(|&node| placed[node]).map(|node| rows[node] + 1).max().unwrap_or(0);
    for node in (0..count).filter(|&node| !placed[node]) {
        rows[node] = below;
    }
    rows
}

/// Visits each node behind all that it comes after, with those that come directly after it. What is in a circle, or
/// behind one, is left out.
pub(crate) fn in_order(count: usize, edges: &[(usize, usize)], mut visit: impl FnMut(usize, &[usize])) {
    let mut missing = vec![0_usize; count];
    let mut after = vec![Vec::new(); count];
    for &(from, to) in edges {
        missing[to] += 1;
        after[from].push(to);
    }
    let mut free: Vec<usize> = (0..count).filter(|&node| missing[node] == 0).collect();
    while let Some(node) = free.pop() {
        visit(node, &after[node]);
        for &to in &after[node] {
            missing[to] -= 1;
            if missing[to] == 0 {
                free.push(to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_are_below_what_they_come_after() {
        assert_eq!(rows(4, &[(0, 1), (0, 2), (1, 3), (2, 3)]), [0, 1, 1, 2]);
        assert_eq!(rows(3, &[(0, 1), (1, 2), (0, 2)]), [0, 1, 2]);
        assert_eq!(rows(3, &[(1, 2), (2, 1)]), [0, 1, 1]);
        assert_eq!(rows(0, &[]), [0_usize; 0]);
    }
}
