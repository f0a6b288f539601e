use super::*;
use crate::config::LoraConfig;

fn modules(layers: usize) -> Modules {
    let mut names = vec!["model.embed_tokens.weight".to_string()];
    for i in 0..layers {
        for part in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "mlp.up_proj"] {
            names.push(format!("model.layers.{i}.{part}.weight"));
        }
        names.push(format!("model.layers.{i}.input_layernorm.weight"));
    }
    names.push("model.norm.weight".into());
    Modules::from_parameters(names.iter().map(String::as_str))
}

fn list(entries: &[&str]) -> TargetModules {
    TargetModules::List(entries.iter().map(|e| e.to_string()).collect())
}

fn spec(target_modules: TargetModules) -> LoraSpec {
    LoraSpec::from_config(&LoraConfig { rank: 4, alpha: 8.0, target_modules, ..LoraConfig::default() })
}

fn found(spec: &LoraSpec) -> Vec<String> {
    resolve(spec, &modules(2)).unwrap().modules.into_iter().map(|m| m.name).collect()
}

fn text(spec: &LoraSpec) -> String {
    let problems = resolve(spec, &modules(2)).unwrap_err();
    problems.iter().map(|p| format!("{p}\n")).collect()
}

#[test]
fn a_list_names_endings_after_a_dot() {
    let q = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"];
    assert_eq!(found(&spec(list(&["q_proj"]))), q);
    assert_eq!(found(&spec(list(&["layers.1.self_attn.q_proj"]))), q[1..]);
    assert!(text(&spec(list(&["_proj"]))).contains("matches no module"));
}

#[test]
fn a_regex_matches_the_whole_name() {
    let regex = |p: &str| spec(TargetModules::Regex(p.into()));
    assert_eq!(found(&regex(r".*\.1\..*(q|up)_proj")).len(), 2);
    assert!(text(&regex("q_proj")).contains("matches no module"));
    assert!(text(&regex("(")).contains("not a regular expression"));
    assert!(text(&regex(r"model\.layers\.0\.mlp.*")).contains("not a linear layer"));
}

#[test]
fn entries_that_match_nothing_are_named_with_the_nearest() {
    let text = text(&spec(list(&["qproj", "up_proj", "value"])));
    assert!(
        text.contains("entries `qproj`, `value` match no module") && text.contains("did you mean `q_proj`"),
        "{text}"
    );
    assert!(text.contains("`value`") && text.contains("lm_head"), "{text}");
    assert!(!text.contains("`up_proj`, "), "{text}");
}

#[test]
fn what_a_string_was_meant_to_be_is_said() {
    let regex = |p: &str| text(&spec(TargetModules::Regex(p.into())));
    for text in [regex("all_linear"), text(&spec(list(&["all_linear"])))] {
        assert!(text.contains("did you mean `\"all-linear\"`"), "{text}");
    }
    assert!(regex("q_proj").contains("the list is `[\"q_proj\"]`"), "{}", regex("q_proj"));
}

#[test]
fn problems_of_a_kind_are_told_as_one() {
    let problems = resolve(&spec(TargetModules::Regex(r".*q_norm".into())), &modules(9)).unwrap_err();
    assert_eq!(problems.len(), 1);
    assert!(problems[0].message.ends_with("and 6 more, which are not linear layers"), "{problems:?}");
    let many = list(&["wq", "wk", "wv", "wo"]);
    assert_eq!(resolve(&spec(many), &modules(2)).unwrap_err().len(), 1);
}

#[test]
fn exclude_and_saved_modules_win() {
    let mut spec = spec(TargetModules::AllLinear);
    spec.exclude_modules = Some(list(&["layers.0.self_attn.k_proj", "up_proj"]));
    spec.modules_to_save = vec!["lm_head".into()];
    let resolved = resolve(&spec, &modules(2)).unwrap();
    let names: Vec<&str> = resolved.modules.iter().map(|m| m.name.as_str()).collect();
    let want = ["0.self_attn.q_proj", "1.self_attn.q_proj", "1.self_attn.k_proj"];
    assert_eq!(names, want.map(|n| format!("model.layers.{n}")));
    assert_eq!(resolved.saved, ["lm_head"]);
    spec.exclude_modules = Some(TargetModules::Regex(".*".into()));
    assert!(text(&spec).contains("exclude"));
}

#[test]
fn patterns_match_the_end_and_the_first_wins() {
    let mut spec = spec(list(&["q_proj", "up_proj"]));
    spec.rank_pattern = vec![("q_proj".into(), 2), (r"layers\.1\..*".into(), 6)];
    spec.alpha_pattern = vec![(r"1\.mlp\.(up|down)_proj".into(), 3.0)];
    let resolved = resolve(&spec, &modules(2)).unwrap().modules;
    let got: Vec<_> = resolved.iter().map(|m| (m.rank, m.alpha, m.scale)).collect();
    assert_eq!(got, [(2, 8.0, 4.0), (4, 8.0, 2.0), (2, 8.0, 4.0), (6, 3.0, 0.5)]);
    spec.use_rslora = true;
    let scale = resolve(&spec, &modules(2)).unwrap().modules[1].scale;
    assert_eq!(scale, 4.0);
}

#[test]
fn layers_to_transform_needs_a_list_and_layers_that_exist() {
    let mut layers = spec(list(&["q_proj", "up_proj"]));
    layers.layers_to_transform = Some(vec![1]);
    assert_eq!(found(&layers), ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]);
    layers.layers_pattern = vec!["layers".into()];
    assert_eq!(found(&layers).len(), 2);
    layers.layers_to_transform = Some(vec![7]);
    assert!(text(&layers).contains("layer 7"));
    layers.target_modules = TargetModules::AllLinear;
    assert!(text(&layers).contains("list"));
}

#[test]
fn embeddings_and_blocks_are_refused_with_what_to_do() {
    assert!(text(&spec(list(&["embed_tokens"]))).contains("modules_to_save"));
    let mut block = spec(list(&["q_proj"]));
    block.modules_to_save = vec!["mlp".into()];
    assert!(text(&block).contains("block"));
    block.modules_to_save = vec!["embedding".into()];
    assert!(text(&block).contains("`embedding` matches no module"));
}

#[test]
fn many_targets_are_condensed_as_peft_stores_them() {
    let few = modules(2);
    assert_eq!(few.condense(few.all_linear()).len(), 6);
    let many = modules(8);
    assert_eq!(many.condense(many.all_linear()), ["q_proj", "k_proj", "up_proj"]);
    let q = |i: usize| format!("model.layers.{i}.self_attn.q_proj");
    let most: Vec<String> = (0..30).map(q).collect();
    let condensed = modules(31).condense(most.clone());
    assert_eq!(condensed.len(), 30, "layer 30 is not a target, so `q_proj` alone would be wrong");
}
