//! The JSON is what `docs/report.schema.json` says: checked by structure, in both directions.

use serde_json::Value;

use super::{
    golden::{busy, troubled},
    jobs::Job,
    scene::{GIB, MIB, Scene},
};

fn schema() -> Value {
    serde_json::from_str(include_str!("../../../../docs/report.schema.json")).unwrap()
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("the schema names the type {other}"),
    }
}

/// What is wrong with `value`, at `path`. Properties that the schema does not name are wrong here,
/// though readers have to accept them: a field that is added must be described.
fn wrong(root: &Value, schema: &Value, value: &Value, path: &str) -> Option<String> {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.strip_prefix("#/$defs/").unwrap();
        return wrong(root, &root["$defs"][name], value, path);
    }
    if let Some(choices) = schema["anyOf"].as_array() {
        let reasons: Vec<String> =
            choices.iter().map_while(|choice| wrong(root, choice, value, path)).collect();
        return (reasons.len() == choices.len()).then(|| reasons.join(" / "));
    }
    if let Some(constant) = schema.get("const") {
        return (constant != value).then(|| format!("{path}: {value} is not {constant}"));
    }
    if let Some(choices) = schema["enum"].as_array() {
        return (!choices.contains(value)).then(|| format!("{path}: {value} is no choice"));
    }
    let fits = match &schema["type"] {
        Value::String(name) => is_type(value, name),
        Value::Array(names) => names.iter().any(|name| is_type(value, name.as_str().unwrap())),
        other => panic!("{path}: the schema has the type {other}"),
    };
    if !fits {
        return Some(format!("{path}: {value} is not {}", schema["type"]));
    }
    match value {
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.find_map(|(i, item)| wrong(root, &schema["items"], item, &format!("{path}[{i}]")))
        }
        Value::Object(fields) => {
            let required = schema["required"].as_array().unwrap();
            let missing = required.iter().find(|name| !fields.contains_key(name.as_str().unwrap()));
            let missing = missing.map(|name| format!("{path}: {name} is missing"));
            missing.or_else(|| {
                fields.iter().find_map(|(name, field)| match schema["properties"].get(name) {
                    None => match schema.get("additionalProperties") {
                        Some(of) => wrong(root, of, field, &format!("{path}.{name}")),
                        None => Some(format!("{path}.{name} is not described")),
                    },
                    Some(of) => wrong(root, of, field, &format!("{path}.{name}")),
                })
            })
        }
        _ => None,
    }
}

fn check(scene: &Scene) {
    let json = serde_json::to_value(scene.model()).unwrap();
    assert_eq!(wrong(&schema(), &schema(), &json, "$"), None);
}

#[test]
fn reports_are_what_the_schema_says() {
    check(&busy());
    check(&troubled());
    check(&Scene::new(1));
    let mut quiet = Scene::new(40);
    quiet.process(7, "./app");
    quiet.alloc(7, 0, 0.1, GIB);
    check(&quiet);
    let leak = Job::training(90, 1).tensors("loop.py:33 train", |t| (3 * t, MIB));
    let mut leak = leak.scene();
    leak.stacks[0].complete = false;
    check(&leak);
}

#[test]
fn the_check_finds_faults() {
    let json = serde_json::to_value(troubled().model()).unwrap();
    let fault = |change: fn(&mut Value)| {
        let mut json = json.clone();
        change(&mut json);
        wrong(&schema(), &schema(), &json, "$").unwrap()
    };
    assert_eq!(fault(|json| json["schema"] = 2.into()), "$.schema: 2 is not 1");
    assert!(fault(|json| json["events"] = Value::Null).starts_with("$.events: null is not"));
    assert!(fault(|json| json["x"] = 1.into()).contains("$.x is not described"));
    assert!(fault(|json| json["findings"][0]["kind"] = "no".into()).contains("is not \"growth\""));
    let fault = fault(|json| {
        json["devices"][0].as_object_mut().unwrap().remove("gpu_uuid");
    });
    assert_eq!(fault, "$.devices[0]: \"gpu_uuid\" is missing");
}

#[test]
fn large_keys_survive_javascript() {
    let mut scene = Scene::new(5);
    scene.process(7, "./app").proc_id = i64::MIN;
    let json = serde_json::to_value(scene.model()).unwrap();
    assert_eq!(json["processes"][0]["proc_id"], "-9223372036854775808");
}
