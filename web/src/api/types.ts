/** The resources under the names of `strata/dashboard/api/model.py`. */
import type { components } from "./schema";

type Schemas = components["schemas"];

export type Barriers = Schemas["Barriers"];
export type Bucket = Schemas["Bucket"];
export type Checkpoint = Schemas["Checkpoint"];
export type CheckpointAction = Schemas["CheckpointAction"];
export type Checkpoints = Schemas["Checkpoints"];
export type Cluster = Schemas["Cluster"];
export type Dataset = Schemas["Dataset"];
export type Datasets = Schemas["Datasets"];
export type Device = Schemas["Device"];
export type Devices = Schemas["Devices"];
export type Event = Schemas["Event"];
export type Events = Schemas["Events"];
export type Finding = Schemas["Finding"];
export type Generation = Schemas["Generation"];
export type Generations = Schemas["Generations"];
export type Goodput = Schemas["Goodput"];
export type Heatmap = Schemas["Heatmap"];
export type History = Schemas["History"];
export type Job = Schemas["Job"];
export type JobSummary = Schemas["JobSummary"];
export type Jobs = Schemas["Jobs"];
export type Me = Schemas["Me"];
export type OpenBarrier = Schemas["OpenBarrier"];
export type Problem = Schemas["Problem"];
export type Rank = Schemas["Rank"];
export type Ranks = Schemas["Ranks"];
export type Series = Schemas["Series"];

export type Action = "pin" | "unpin" | "tag" | "untag" | "delete" | "fork";
